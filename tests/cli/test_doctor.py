"""`torchloom doctor`: what it finds, and how it exits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from torchloom._torch.table import PrivateName
from torchloom.cli import doctor as module
from torchloom.cli.doctor import doctor
from torchloom.serve.store.signing_key import SigningKey

app = typer.Typer()
app.command()(doctor)
RUN = module._run


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch) -> None:
    """Most tests are about one line: process groups and kernels are taken to work."""
    monkeypatch.setattr(module, "_run", lambda code, timeout_s: None)


def findings(*, exit_code: int, env: dict[str, str] | None = None) -> dict[str, list[dict]]:
    result = CliRunner().invoke(app, ["--json"], env=env)
    assert result.exit_code == exit_code, result.output
    found: dict[str, list[dict]] = {}
    for each in json.loads(result.output):
        found.setdefault(each["about"], []).append(each)
    return found


def test_a_machine_that_works(monkeypatch) -> None:
    text = CliRunner().invoke(app, []).output
    assert "process group could be made" in text
    monkeypatch.setattr(module, "_run", RUN)
    found = findings(exit_code=0)
    assert {"torch", "C++ compiler", "compile cache", "gloo", "Python"} <= found.keys()
    assert all(each["state"] != "FAIL" for group in found.values() for each in group)


@pytest.mark.parametrize(
    ("version", "state", "says"),
    [
        ("2.10.1", "FAIL", "pip install 'torch>=2.11'"),
        ("2.15.1+cu132", "ok", ""),
        ("2.16.0.dev20261101+cpu", "note", "install 'torch~=2.15.0'"),
    ],
)
def test_versions_of_torch(monkeypatch, version, state, says) -> None:
    monkeypatch.setattr("torch.__version__", version)
    found = next(each for each in module._versions() if each.about == "torch")
    assert (found.state, says in (found.cure or "")) == (state, True)


def test_the_range_is_that_of_the_package() -> None:
    root = Path(__file__).parents[2]
    assert f'"torch{module.TORCH_RANGE}"' in (root / "pyproject.toml").read_text()
    assert f'"{module.NEWEST_TESTED}"]' in (root / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize(
    ("is_needed", "since", "state", "says"),
    [
        (True, "", "FAIL", "torch~=2.15.0"),
        (False, "", "note", "torch~=2.15.0"),
        (True, "9.1", "note", ""),
    ],
)
def test_internals_that_are_missing(monkeypatch, is_needed, since, state, says) -> None:
    name = "torch._dynamo.moved_away"
    row = PrivateName(name=name, without="no x", since=since, is_needed=is_needed)
    monkeypatch.setattr("torchloom._torch.resolve.NAMES", (row,))
    (found,) = module._internals()
    assert found.state == state
    assert found.what.startswith("torch._dynamo has no moved_away: no x")
    assert says in (found.cure or "")


def test_no_compiler(monkeypatch) -> None:
    monkeypatch.setattr(module, "cpp_compiler", lambda: None)
    (found,) = findings(exit_code=1)["C++ compiler"]
    assert found["state"] == "FAIL"
    assert "apt install g++" in found["cure"]


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked))
    (found,) = findings(exit_code=1)["compile cache"]
    assert "TORCHINDUCTOR_CACHE_DIR" in found["cure"]


def test_switches_that_change_what_compiles() -> None:
    (found,) = findings(exit_code=0, env={"TORCHDYNAMO_SUPPRESS_ERRORS": "1"})["environment"]
    assert found["state"] == "note"
    assert "unset TORCHDYNAMO_SUPPRESS_ERRORS" in found["cure"]


def test_a_process_group_that_cannot_be_made(monkeypatch) -> None:
    monkeypatch.setattr(module, "_run", lambda code, timeout_s: "RuntimeError: no route")
    (found,) = findings(exit_code=1)["gloo"]
    assert "no route" in found["what"]


@pytest.mark.slow
def test_the_probe_compiles(monkeypatch) -> None:
    monkeypatch.setattr(module, "_run", RUN)
    result = CliRunner().invoke(app, ["--probe", "--json"])
    assert result.exit_code == 0, result.output
    assert any(each["about"] == "Inductor" for each in json.loads(result.output))


def test_wrong_variables_of_a_launcher() -> None:
    (found,) = findings(exit_code=1, env={"WORLD_SIZE": "2", "RANK": "7"})["launcher"]
    assert found["state"] == "FAIL"
    assert "RANK=7 is out of range" in found["what"]


def test_what_is_open_is_said(monkeypatch, tmp_path) -> None:
    cache, store = tmp_path / "cache", tmp_path / "store"
    for folder in (cache, store / "objects"):
        folder.mkdir(parents=True)
    cache.chmod(0o777)
    (store / "objects" / "code").write_text("")
    (store / "objects" / "code").chmod(0o666)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(module, "_gloo_fails", lambda: None)
    monkeypatch.setattr(module, "_run", lambda code, timeout_s: "RuntimeError: at 0.0.0.0 port 1")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = os.umask(0o002)
    try:
        result = CliRunner().invoke(app, ["--json", str(store), str(tmp_path / "none")])
    finally:
        os.umask(before)
    found = {each["what"]: each for each in json.loads(result.output)}
    said = {each["about"]: each for each in found.values() if each["state"] == "note"}
    assert "can be written by others (mode 777)" in said["code from the cache"]["what"]
    assert "code can be written by others (mode 666)" in said["folder"]["what"]
    assert f"chmod -R go-w {store}" in said["folder"]["cure"]
    assert said["temporary files"]["cure"].startswith("chmod +t")
    assert "umask 002" in said["new files"]["what"]
    assert "0.0.0.0 port 1" in said["ports"]["what"]
    assert "ask who connects" in said["several hosts"]["what"]
    assert f"{tmp_path / 'none'} is not there yet" in found


@pytest.mark.parametrize("mode", [0o644, 0o606])
def test_a_key_that_others_can_read_is_a_failure(monkeypatch, own_key, mode) -> None:
    monkeypatch.setattr(module, "_run", lambda code, timeout_s: None)
    SigningKey(make=True)
    (good,) = findings(exit_code=0)["key of stores"]
    assert good["state"] == "ok"
    own_key.chmod(mode)
    try:
        (found,) = findings(exit_code=1)["key of stores"]
        assert f"chmod 600 {own_key}" in found["cure"]
    finally:
        own_key.chmod(0o600)
