"""`torchloom serve`: check, build, inspect, why-miss, bench-startup on a file of the user's."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
from typer.testing import CliRunner

from torchloom.cli import make_app
from torchloom.cli.serve import build_command, check
from torchloom.errors import ServeError, TorchloomError
from torchloom.records import load_record

SOURCE = """
import torch
from torch import nn
from torchloom.serve import Contract, Dim

class Model(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(4, eps=eps)

    def forward(self, x):
        return self.norm(x) * (2 if x.shape[0] >= 4 else 3)

def contract():
    return Contract({"x": (Dim("batch", 1, 8), 4)})

def make():
    return Model().eval(), contract()

def split():
    return Model().eval(), contract(), {"shapes": "split"}

def other():
    return Model(eps=0.1).eval(), contract()

def wrong():
    return Model().eval()

def unknown():
    return Model().eval(), contract(), {"shape": 1}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in this process, in a folder with a file that no command before has imported."""
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(make_app("serve"), ["serve", *arguments])
        said = f"{done.exception}" if isinstance(done.exception, TorchloomError) else ""
        return done.exit_code, done.output + said

    yield call
    sys.modules.pop("mine", None)


def test_from_check_to_a_miss(run, tmp_path):
    code, text = run("check", "mine.py:make")
    assert code == 1
    assert "not true for batch 1 to 3" in text
    assert "mine.py" in text
    code, text = run("check", "mine.py:split")
    assert code == 0, text
    assert "batch 1 to 3" in text
    assert "batch 4 to 8" in text
    code, text = run("build", "mine.py:split", "programs")
    assert code == 0, text
    assert text.startswith("built in")
    assert run("build", "mine.py:split", "programs")[1].startswith("loaded in")
    code, text = run("inspect", "programs")
    assert "mine.Model" in text
    assert "1 program," in text
    assert "damaged" not in text
    (record,) = (tmp_path / "programs" / "records").glob("*.json")
    assert f"torchloom report programs/records/{record.name}" in text
    session = load_record(record)
    assert [row.data["boxes"] for row in session.events if row.kind == "ProgramReady"] == [
        ["batch 1 to 3", "batch 4 to 8"]
    ]
    found = json.loads(run("inspect", "programs", "--json")[1])
    assert len(found["programs"]) == 1
    assert run("why-miss", "programs", "mine.py:make") == (0, "a program fits\n")
    code, text = run("why-miss", "programs", "mine.py:other")
    assert code == 1
    assert "norm.eps was 1e-05, is 0.1" in text
    part = next(each for each in (tmp_path / "programs" / "objects").rglob("*") if each.is_file())
    part.write_bytes(b"")
    text = run("inspect", "programs")[1]
    assert f"{part.name} is damaged" in text


@pytest.mark.usefixtures("run")
def test_a_wrong_target_is_one_line():
    for target, text in {
        "mine.py": "names no function",
        "no.py:make": "there is no file 'no.py'",
        "mine.py:no": "has no function 'no'",
        "mine.py:wrong": "return (model, contract)",
        "mine.py:unknown": "the option 'shape'",
    }.items():
        with pytest.raises(TorchloomError) as told:
            check(target)
        assert text in str(told.value)
        assert "\n" not in str(told.value)


def test_cold_and_warm_starts_are_timed(run):
    code, text = run("bench-startup", "mine.py:split", "--repeats", "1")
    assert code == 0, text
    cold, warm = text.splitlines()[-2:]
    assert cold.startswith("cold")
    assert "0 traces, 0 graphs compiled" in warm
    assert "0 traces" not in cold


def test_nothing_is_proven_or_stored_where_compiling_is_turned_off(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.setenv("TORCHLOOM_ENFORCE_EAGER", "1")
    for command in (partial(check), partial(build_command, store=tmp_path / "programs")):
        with pytest.raises(
            ServeError, match="nothing is compiled under TORCHLOOM_ENFORCE_EAGER=1: unset it"
        ):
            command(f"{tmp_path}/mine.py:split", shapes="")
