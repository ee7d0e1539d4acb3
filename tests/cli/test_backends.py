"""`torchloom backends`: names, origins, and what works here."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from torchloom.backends import temporary_backend
from torchloom.cli.doctor import backends

app = typer.Typer()
app.command()(backends)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_the_usual_ones() -> None:
    text = run().output
    assert "inductor" in text
    assert "built-in, torchloom" in text
    assert "aot_eager" not in text
    assert "--all shows them" in text


def test_all_of_them_and_a_registered_one() -> None:
    with temporary_backend(lambda gm, inputs: gm.forward, name="seen_here", tags=("debug",)):
        assert "seen_here" not in run().output
        text = run("--all").output
    assert "seen_here" in text
    assert "test_backends.py" in text
    assert "aot_eager" in text


def test_json() -> None:
    rows = {row["name"]: row for row in json.loads(run("--all", "--json").output)}
    assert rows["tvm"]["why_not"] == "module 'tvm' is not installed"
    assert rows["eager"]["tags"] == ["debug"]
    assert rows["eager"]["origin"] == {"kind": "built-in", "where": "torch"}
