"""`torchloom explain FILE.py:function` where importing the file has compiled already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.commands import invoke
from torchloom.cli.explain import explain

HEAD = """
import torch
torch._dynamo.config.recompile_limit = 1
X = torch.ones(2)

@torch.compile(backend="eager", dynamic=False)
def f(x, n):
    return x + len(n)

@torch.compile(backend="eager", dynamic=False)
def g(x):
    return x * 2

def plain():
    return torch.ones(2).sin()
"""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def run(file: Path, body: str, name: str) -> str:
    file.write_text(HEAD + body)
    result = invoke(explain, f"{file}:{name}")
    assert result.exit_code == 0
    return result.output


OVER = """
f(X, "a"); f(X, "bb")

def main():
    print("main runs")
    return f(X, "ccc")
"""


def test_a_limit_that_the_import_has_reached(tmp_path: Path) -> None:
    text = run(tmp_path / "demo.py", OVER, "main")
    assert text.count("main runs") == 1
    assert "RECOMPILE LIMIT: f" in text
    assert "the recompile limit of 1 is reached: 2 calls" in text
    assert "main (" not in text


HIT = """
g(X)

def main():
    print("main runs")
    return g(X)
"""


def test_a_function_that_calls_none_of_them_is_compiled_itself(tmp_path: Path) -> None:
    text = run(tmp_path / "demo.py", HIT, "plain")
    assert "plain (" in text
    assert "1 entry" in text
