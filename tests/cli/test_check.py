"""`torchloom check`: what it prints and how it exits."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

import torchloom
from torchloom.cli import make_app
from torchloom.cli.check import check

app = typer.Typer()
app.command()(check)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "ds.json"
        path.write_text(text)
        return str(path)

    return write


GOOD = """{
  "train_micro_batch_size_per_gpu": 4, // per rank
  "steps_per_print": Infinity,
  "typo": 1,
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 1e9},
}"""
BAD = '{"zero_optimization": {"stage": 4}, "seed": "x", "compile": {"schedule": [["soon", []]]}}'


def test_a_good_file_prints_values_hints_and_warnings(write):
    result = run(write(GOOD), "--world-size", "8")

    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "batch.train_batch_size 32" in lines
    assert "zero.stage 3" in lines
    hint = next(line for line in lines if line.startswith("hint"))
    assert "zero_optimization.reduce_bucket_size: asked 1000000000, used 1000000000" in hint
    assert any(line.startswith("warning typo: unknown key") for line in lines)
    assert "seed null" not in lines
    whole = run(write(GOOD), "--all").output
    assert "seed null" in [" ".join(line.split()) for line in whole.splitlines()]
    assert "--all shows them" not in whole


def test_strict_treats_warnings_as_errors(write):
    path = write(GOOD)
    result = run(path, "--strict")

    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("failed 1 warning in ")
    record = json.loads(run(path, "--strict", "--json").stdout)
    assert not record["ok"] and record["errors"] == [] and record["effective"]
    assert run(write('{"steps_per_print": 5}'), "--strict").exit_code == 0
    assert "failed 3 errors in " in run(write(BAD), "--strict").output


def test_version():
    result = CliRunner().invoke(make_app(None), ["--version"])

    assert (result.exit_code, result.output) == (0, f"torchloom {torchloom.__version__}\n")


def test_a_bad_file_prints_every_error_with_its_path(write):
    result = run(write(BAD))

    assert result.exit_code == 1
    errors = [line for line in result.output.splitlines() if line.startswith("error")]
    assert len(errors) == 3
    for path in ("zero_optimization.stage:", "seed:", "compile.schedule[0][0]:"):
        assert any(path in line for line in errors)


def test_without_a_world_size_the_file_may_ask_for_any(write):
    path = write(
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4,'
        ' "gradient_accumulation_steps": 2}'
    )

    assert run(path).exit_code == 0
    assert "8 ranks" in run(path).output
    failed = run(path, "--world-size", "4")
    assert failed.exit_code == 1
    assert "train_batch_size=32" in failed.output


def test_json_is_one_strict_object(write):
    result = run(write(GOOD), "--json")

    record = json.loads(result.stdout, parse_constant=pytest.fail)
    assert record["ok"]
    assert record["effective"]["steps_per_print"] == "Infinity"
    assert record["effective"]["zero"]["stage"] == 3
    assert record["hints"][0]["used"] == 1_000_000_000
    assert record["errors"] == []


def test_auto_values_come_from_the_command_line(write):
    path = write('{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}')

    assert run(path).exit_code == 0
    assert run(path, "--auto", "optimizer.params.lr=1e-4").exit_code == 0
    assert "PATH=VALUE" in run(path, "--auto", "oops").stderr


def test_what_a_trainer_fills_in_is_listed(write):
    path = write(
        '{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupDecayLR",'
        ' "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}}'
    )
    found = run(path)

    assert found.exit_code == 0
    text = " ".join(found.stdout.split())
    assert 'filled in optimizer.params.lr: "auto", filled in by the caller' in text
    assert "optimizer.params.lr filled in by the caller" in text
    assert "can be used by a caller that fills in 3 values" in text
    record = json.loads(run(path, "--json").stdout)
    assert record["ok"]
    assert record["filled_by_caller"] == [
        "optimizer.params.lr", "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps",
    ]  # fmt: skip
    wrong = run(
        write(
            '{"fp16": {"hysteresis": 0}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}'
        )
    )
    assert wrong.exit_code == 1


def test_invalid_json_is_one_line_with_line_and_column(write):
    result = run(write('{\n  "a" 1\n}'))

    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "line 2 column 7" in result.stderr
    record = json.loads(run(write("{"), "--json").stdout)
    assert "line 1" in record["errors"][0]["what"]
