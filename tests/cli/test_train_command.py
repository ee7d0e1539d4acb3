"""The command: options, checks before any process starts, workers that fail, no torch for help."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from support.commands import NOT_LAUNCHED, python
from torchloom import envs
from torchloom.cli import make_app
from torchloom.cli.train import to_argv
from torchloom.errors import CheckpointError, ConfigError, DataError, TorchloomError
from torchloom.recipes.train import TrainOptions
from torchloom.recipes.train import options as preflight


def refused(*argv):
    result = CliRunner(env=NOT_LAUNCHED).invoke(make_app("train"), ["train", *map(str, argv)])
    assert isinstance(result.exception, TorchloomError), result.output
    return result.exception


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 400)
    return path


def test_help_is_quick_and_does_not_import_torch():
    code = (
        "import sys; from torchloom.cli import make_app;"
        "make_app('train')(['train', '--help'], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'tensorboard'} & set(sys.modules); sys.exit(str(heavy) "
        "if heavy else 0)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "--resume" in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)


def test_every_option_reaches_the_worker_unchanged(text, tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(
        "torchloom.cli.launcher.launch", lambda argv, nproc: launched.append(argv) or 0
    )
    argv = ["--data", text, "--out", tmp_path / "out", "--steps", "7", "--no-compile", "--seed", "5",
            "--seq-len", "32", "--micro-batch", "2", "--eval-every", "3", "--log-every", "4",
            "--nproc", "3", "--model", "llama-34m"]  # fmt: skip
    result = CliRunner(env=NOT_LAUNCHED).invoke(make_app("train"), ["train", *map(str, argv)])
    assert result.exit_code == 0, result.output
    assert sorted(launched[0]) == sorted(["train", *map(str, argv)])
    seen = []
    monkeypatch.setattr("torchloom.cli.train._become_worker", seen.append)
    worker_env = {**NOT_LAUNCHED, "WORLD_SIZE": "3", "RANK": "0"}
    CliRunner(env=worker_env).invoke(make_app("train"), launched[0])
    assert ["train", *to_argv(seen[0])] == launched[0]


def test_bad_requests_are_refused_before_a_worker_starts(text, tmp_path):
    out = tmp_path / "out"
    assert "neither a file" in str(refused("--data", tmp_path / "no", "--out", out))
    assert "neither a preset" in str(refused("--model", "lama", "--out", out))
    assert "holds no config.json" in str(refused("--model", tmp_path, "--out", out))
    assert "no such file" in str(refused("--config", tmp_path / "no.json", "--out", out))
    assert "no checkpoint" in str(refused("--data", text, "--resume", "--out", out))
    assert "cannot write" in str(refused("--data", text, "--out", text))
    assert not out.exists()


def test_every_config_problem_is_told_at_once(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"gradient_cliping": 1, "zero_optimization": {"stage": 7}}')
    message = str(refused("--config", path))
    assert "2 errors" in message
    assert "gradient_clipping?" in message
    assert "zero_optimization.stage" in message
    assert "contradict" in str(refused("--config", path, "--micro-batch", 2))


def test_a_missing_extra_is_named(monkeypatch, text, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torchloom[tensorboard]" in str(refused("--data", text, "--tensorboard"))
    (tmp_path / "config.json").write_text("{}")
    assert "torchloom[hf]" in str(refused("--data", text, "--model", tmp_path))


def test_a_failing_worker_says_why_on_every_rank_and_fails_the_run(tmp_path):
    code = (
        "from torchloom.cli.launcher import launch; import sys;"
        f"sys.exit(launch(['train', '--data', {str(tmp_path / 'no')!r}], 2))"
    )
    result = python("-c", code)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "failed with exit code 1" in result.stderr
    for rank in (0, 1):
        assert f"[rank {rank}] DataError: data path" in result.stderr


def test_a_launched_process_names_its_rank(tmp_path):
    environment = envs.child_environment({"WORLD_SIZE": "2", "RANK": "1"})
    result = subprocess.run(
        [sys.executable, "-m", "torchloom", "train", "--model", "lama"],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("[rank 1] ConfigError: model 'lama'")


def test_out_is_fresh_refused_or_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first = preflight.choose_out(TrainOptions())
    assert str(first) == "runs/llama-tiny-now"
    with pytest.raises(CheckpointError, match="no run under 'runs'"):
        preflight.choose_out(TrainOptions(resume=True))
    preflight.make_out(first)
    assert str(preflight.choose_out(TrainOptions())) == "runs/llama-tiny-now-2"
    checkpoints = preflight.checkpoint_dir(first)
    checkpoints.mkdir(parents=True)
    (checkpoints / ".torchloom.lock").touch()  # a run that ended before its first checkpoint
    with pytest.raises(CheckpointError, match="no run under 'runs'"):
        preflight.choose_out(TrainOptions(resume=True))
    (checkpoints / "global_step1").mkdir()
    (checkpoints / "global_step1" / "manifest.json").touch()
    assert preflight.choose_out(TrainOptions(resume=True)) == first
    assert preflight.choose_out(TrainOptions(resume=True, out=str(first))) == first
    with pytest.raises(ConfigError, match="already holds a run"):
        preflight.choose_out(TrainOptions(out=str(first)))


def test_too_little_text_names_the_option(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("hello " * 100)
    error = refused("--data", path, "--out", tmp_path / "out")
    assert isinstance(error, DataError)
    assert "--seq-len" in str(error)
