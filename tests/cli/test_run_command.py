"""`torchloom run`: a user's script in ranks of this host; of several errors, the first one alone is shown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.commands import NOT_LAUNCHED, python
from torchloom.cli import make_app
from torchloom.errors import ConfigError

SCRIPT = """
import os, signal, sys

import beside

print(f"{__name__} {sys.argv[1:]} {beside.NAME} of {os.environ['WORLD_SIZE']}")
rank = os.environ["RANK"]


def load(row):
    raise ValueError(f"row {row} of rank {rank} is bad")


if sys.argv[1] == "--raise":
    load(7)
elif rank == "1":
    sys.exit(7)
signal.pause()
"""


def launched(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("NAME = 'beside'")
    return python("-m", "torchloom", "run", "--nproc", 2, folder / "train.py", *argv)


def test_ranks_fail_alike_and_one_of_them_says_why(tmp_path):
    ended = launched(tmp_path, "--raise", "--nproc", "--", "3")
    assert ended.returncode == 1
    assert "__main__ ['--raise', '--nproc', '--', '3'] beside of 2\n" in ended.stdout
    assert ended.stderr.count("Traceback") == 1
    [rank] = re.findall(r"ValueError: row 7 of rank (\d) is bad\n", ended.stderr)
    *words, last = ended.stderr.splitlines()
    files = [line for line in words if line.strip().startswith("File ")]
    assert len(files) == 2 and all("train.py" in line for line in files)
    assert last == f"torchloom run: rank {rank} failed with exit code 1; see its message above"


def test_the_exit_code_is_that_of_the_script(tmp_path):
    ended = launched(tmp_path, "--exit")
    assert ended.returncode == 7
    assert ended.stderr == "torchloom run: rank 1 failed with exit code 7; see its message above\n"


@pytest.mark.parametrize(
    ("gpus", "asked", "ranks"), [(0, [], 2), (4, [], 4), (4, ["--nproc", "3"], 3)]
)
def test_ranks_and_arguments(tmp_path, monkeypatch, gpus, asked, ranks):
    calls = []
    monkeypatch.setattr(
        "torchloom.cli.launcher.launch",
        lambda argv, nproc, *_, **__: calls.append((argv, nproc)) or 0,
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    script = tmp_path / "train.py"
    script.touch()
    argv = ["run", *asked, str(script), "--nproc", "9", "--help"]
    result = CliRunner(env=NOT_LAUNCHED).invoke(make_app("run"), argv)
    assert result.exit_code == 0, result.output
    assert calls == [(["run", str(script), "--nproc", "9", "--help"], ranks)]


def test_a_script_that_is_not_there():
    result = CliRunner(env=NOT_LAUNCHED).invoke(make_app("run"), ["run", "no.py"])
    assert isinstance(result.exception, ConfigError)
    assert "there is no file 'no.py'" in str(result.exception)
