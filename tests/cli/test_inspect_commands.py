"""`torchloom explain`, `report`, `diff` and `check-record` on real records."""

from __future__ import annotations

import pytest
import torch

import torchloom
from support.commands import invoke
from torchloom.cli.explain import explain
from torchloom.cli.records import check_record, diff, report
from torchloom.errors import InspectError
from torchloom.records import load_record

SCRIPT = """
import sys
import torch

@torch.compile(backend="eager")
def step(x):
    x = x + 1
    print("step", *sys.argv[1:])
    return x * 2

def plain():
    return torch.ones(2).sin()

if __name__ == "__main__":
    step(torch.ones(2))
    step(torch.ones(3))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "demo.py"
    path.write_text(SCRIPT)
    torch._dynamo.reset()
    return path


def test_explain_a_script(script, tmp_path) -> None:
    result = invoke(explain, "--record", tmp_path / "r.json", script, "--", "with", "words")
    assert result.exit_code == 0
    assert "step with words" in result.output
    assert "graph break at" in result.output
    assert "demo.py:8" in result.output
    assert "expected size(0) == 2, got 3" in result.output
    assert len(result.output.splitlines()) < 40
    assert load_record(tmp_path / "r.json")["step"].entries


def test_explain_a_function(script) -> None:
    result = invoke(explain, f"{script}:plain")
    assert "plain" in result.output
    assert "0 graph breaks" in result.output
    with pytest.raises(InspectError, match="it has step, plain"):
        invoke(explain, f"{script}:missing")


@pytest.fixture
def records(tmp_path):
    def fn(x):
        return x.sin() + 1

    for name, sizes in (("one", (2,)), ("two", (2, 3))):
        torch._dynamo.reset()
        with torchloom.watch(tmp_path / name):
            compiled = torch.compile(fn, backend="eager")
            for size in sizes:
                compiled(torch.ones(size))
    return tmp_path


def test_diff(records) -> None:
    same = invoke(diff, records / "one", records / "one" / "record.json")
    assert (same.exit_code, same.output.strip()) == (0, "no difference")
    other = invoke(diff, records / "one", records / "two")
    assert other.exit_code == 1
    assert "1 -> 2 entries" in other.output


def test_check_record(records) -> None:
    good = invoke(check_record, records / "one", "--max-recompiles", 0, "--max-breaks", 0)
    assert good.exit_code == 0
    assert "ok    recompiles: 0 (at most 0)" in good.output
    bad = invoke(check_record, records / "two", "--max-recompiles", 0)
    assert bad.exit_code == 1
    assert "OVER  recompiles: 1 (at most 0)" in bad.output
    assert "expected size(0) == 2, got 3" in bad.output


def test_report_of_a_folder_and_its_trace(records) -> None:
    result = invoke(report, records / "two", "--trace", records / "trace.json")
    assert result.exit_code == 0
    assert (records / "two" / "report.html").stat().st_size > 1000
    assert (records / "trace.json").is_file()
