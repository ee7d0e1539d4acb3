"""Variables of the environment that a model asks for are facts, set or not; their values are not written down."""

from __future__ import annotations

import json

import pytest
import torch

from serve.model.edits import COUNT, FORWARD, HEAD, made
from serve.models import rows
from torchloom.errors import ArtifactError
from torchloom.serve import build, load

ASK = """
import os
PREFIX = "LOOM"
also = os.getenv
def ask(name, default="1"):
    return float(os.environ.get(name, default))
def attempt(name):
    try:
        return float(os.environ[name])
    except KeyError:
        return 1.0
"""
VALUES = {
    "get": "x * float(os.environ.get('LOOM_SCALE', '1'))",
    "getenv": "x * float(os.getenv('LOOM_SCALE', '1'))",
    "in": "x * (3 if 'LOOM_SCALE' in os.environ else 2)",
    "by its error": "x * attempt('LOOM_SCALE')",
    "handed on": "x * ask('LOOM_SCALE')",
    "by an attribute": "x * ask(self.name)",
    "under another name": "x * float(also('LOOM_SCALE', '1'))",
    "put together": "x * float(os.environ.get(f'{PREFIX}_SCALE', '1'))",
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("was", [None, "2"])
def test_a_variable_that_is_set_otherwise_is_a_miss(name, was, tmp_path, monkeypatch):
    text = HEAD + ASK + FORWARD % ("self.name = 'LOOM_SCALE'", VALUES[name])
    module, x, store = f"environ_{next(COUNT)}", torch.randn(3, 16), tmp_path / "store"

    def put(value):
        monkeypatch.delenv("LOOM_SCALE", raising=False)
        if value is not None:
            monkeypatch.setenv("LOOM_SCALE", value)
        return made(text, module, tmp_path)

    with torch.no_grad():
        model = put(was)
        program = build(model, rows(), backend="eager", store=store)
        assert not program.variants[0].why_not_stored
        monkeypatch.setenv("MOON_OTHER", "5")  # which nobody asks for
        torch.testing.assert_close(load(store, put(was))(x), model(x))
        assert program.changed() == []
        for value in {None, "2", "3"} - {was}:
            edited = put(value)
            assert "of the environment" in " ".join(program.changed())
            try:
                loaded = load(store, edited)
            except ArtifactError as error:
                assert "of the environment" in str(error)
            else:
                torch.testing.assert_close(loaded(x), edited(x))


def test_what_a_variable_is_set_to_is_in_no_store(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOM_SCALE", "78125.5")
    model = made(HEAD + ASK + FORWARD % ("pass", VALUES["get"]), "environ_secret", tmp_path)
    program = build(model, rows(), backend="eager", store=tmp_path / "store", check="off")
    assert "78125" not in json.dumps(dict(program.variants[0].facts))
    assert list((tmp_path / "store").glob("entries/*"))
