"""`check-record` and `diff` on programs of which calls ran eagerly, though no recompile tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torchloom
from support.commands import invoke
from torchloom.cli.records import check_record, diff
from torchloom.errors import ExpectationError

X = torch.ones(2)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(command: Callable[..., None], *arguments: object) -> tuple[int, str]:
    result = invoke(command, *arguments)
    return result.exit_code, result.output


def scaled(x, n):
    return x + len(n)


def chosen(x, is_used):
    return x + 1 if is_used else x


def refuses(gm, example_inputs):
    raise RuntimeError("this backend refuses")


def over_the_limit(path: Path, num_calls: int) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1), torchloom.watch(path):
        compiled = torch.compile(scaled, backend="eager")
        for number in range(1, num_calls + 1):
            compiled(X, "a" * number)


def test_calls_over_the_limit_pass_a_limit_on_recompiles(tmp_path: Path) -> None:
    over_the_limit(tmp_path, 6)
    code, text = run(check_record, tmp_path, "--max-recompiles", 0, "--max-breaks", 0)
    assert code == 1
    assert "OVER  eager calls: 5 (at most 0)" in text
    assert "scaled" in text
    assert "the recompile limit of 1 is reached" in text
    code, text = run(check_record, tmp_path, "--max-recompiles", 0, "--max-eager-calls", 5)
    assert (code, "ok    eager calls: 5 (at most 5)" in text) == (0, True)
    code, text = run(check_record, tmp_path)
    assert (code, "ok    eager calls: 5 (no limit)" in text) == (0, True)


def failed(path: Path) -> None:
    with torch._dynamo.config.patch(suppress_errors=True), torchloom.watch(path):
        torch.compile(scaled, backend=refuses)(X, "a")


def fell_silent(path: Path) -> None:
    with torchloom.watch(path):
        compiled = torch.compile(chosen, backend="eager")
        compiled(X, True), compiled(X, False), compiled(X, True)


@pytest.mark.parametrize(
    ("program", "why"),
    [(failed, "this backend refuses"), (fell_silent, "its entries not used")],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_functions_that_compiling_gave_up(program, why: str, tmp_path: Path) -> None:
    program(tmp_path / "a")
    code, text = run(check_record, tmp_path / "a", "--max-recompiles", 0, "--max-breaks", 0)
    assert code == 1
    assert "OVER  functions given up: 1 (at most 0)" in text
    assert why in text
    assert run(check_record, tmp_path / "a")[0] == 0
    with torchloom.watch(tmp_path / "b"):
        pass
    code, text = run(diff, tmp_path / "b", tmp_path / "a")
    assert (code, why in text) == (1, True)


@pytest.mark.parametrize("promise", ["recompiles", "graph_breaks"])
def test_a_promise_sees_functions_that_compiling_gave_up(promise: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ExpectationError, match=r"scaled .*this backend refuses"),
        torchloom.expect(**{promise: 0}),
    ):
        failed(tmp_path)
