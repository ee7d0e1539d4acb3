"""What keys of stored programs are made of besides the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchloom
from torchloom.serve.store.misses import machine_of

SAYS = "from torchloom.serve.store.misses import machine_of; print(machine_of(['cpu']))"


def said(folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("house") / "torchloom"
    shutil.copytree(Path(torchloom.__path__[0]), folder)
    return folder


@pytest.mark.parametrize("file", ["pieces/plain.py", "_torch/standalone.py", "serve/__init__.py"])
def test_an_upgrade_of_what_builds_programs_has_another_key(house, file) -> None:
    """Programs of an older torchloom are found by their key alone."""
    before = said(house.parent)
    assert before == said(house.parent)
    edited = house / file
    edited.write_text(edited.read_text() + "\n\nEDITED = True\n")
    assert said(house.parent) != before


def test_an_upgrade_of_what_trains_has_the_same_key(house) -> None:
    before = said(house.parent)
    edited = house / "loop" / "clip.py"
    edited.write_text(edited.read_text() + "\n\nEDITED = True\n")
    assert said(house.parent) == before


def test_facts_are_texts() -> None:
    facts = machine_of(["cpu", "cuda"])
    assert all(isinstance(value, str) for value in facts.values())
    assert {"torch", "torchloom", "python", "processor", "threads", "cuda"} <= facts.keys()
