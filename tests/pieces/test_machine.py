"""What keys of stored programs are made of besides the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torchloom
from torchloom.serve.store.misses import machine_of

SAYS = "from torchloom.serve.store.misses import machine_of; print(machine_of(['cpu']))"


def said(folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_an_upgrade_of_what_builds_programs_alone_has_another_key(tmp_path) -> None:
    """Programs of an older torchloom are found by their key alone."""
    house = tmp_path / "torchloom"
    shutil.copytree(Path(torchloom.__path__[0]), house)
    before = said(tmp_path)
    for file in ("loop/clip.py", "pieces/plain.py", "_torch/standalone.py", "serve/__init__.py"):
        path = house / file
        path.write_text(path.read_text() + "\n\nEDITED = True\n")
        after = said(tmp_path)
        assert (after == before) is (file == "loop/clip.py"), file
        before = after


def test_facts_are_texts() -> None:
    facts = machine_of(["cpu", "cuda"])
    assert all(isinstance(value, str) for value in facts.values())
    assert {"torch", "torchloom", "python", "processor", "threads", "cuda"} <= facts.keys()
