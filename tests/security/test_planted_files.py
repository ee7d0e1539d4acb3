"""Writers of files, where something else stands under the name of the file or of its temporary one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import fx

from torchloom.checkpoints import lock, save_model
from torchloom.errors import TorchloomError
from torchloom.files import open_to_append, write_whole
from torchloom.loop.trackers import _append
from torchloom.pipeline.manager import PassManager
from torchloom.recipes.train.metrics import json_lines
from torchloom.recipes.train.options import make_out

WEIGHT = save_model.Weight("w", (2, 3), torch.float32, lambda: [torch.ones(6)])


def write_sink(path: Path) -> None:
    with json_lines(path):
        pass


def dump_graph(path: Path) -> None:
    manager = object.__new__(PassManager)
    manager.dump_dir = path.parent
    manager._dump(fx.symbolic_trace(lambda x: x + 1), "g", 0, "pass")


WRITERS = {
    "text": ("file", lambda path: write_whole(path, "new")),
    "one file of weights": ("a.safetensors", lambda p: save_model.write_file([WEIGHT], p)),
    "a folder of weights": (
        "model.safetensors",
        lambda p: save_model.write_folder([WEIGHT], p.parent, 1 << 30),
    ),
    "an index of weights": (
        "model.safetensors.index.json",
        lambda p: save_model.write_folder([WEIGHT, WEIGHT._replace(name="v")], p.parent, 8),
    ),
    "weights by torch.save": ("a.pt", lambda p: save_model.write_file([WEIGHT], p)),
    "a dump of a graph": ("g.00.pass.txt", dump_graph),
    "a tracker's csv": ("a.csv", lambda path: _append(path, "Train/a", 1, 2.0)),
    "metrics": ("metrics.jsonl", write_sink),
    "the probe of a run's folder": (".writable", lambda path: make_out(path.parent)),
    "the lock of checkpoints": (lock.NAME, lambda path: os.close(lock._locked(path))),
}


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_what_was_planted(writer, kind, tmp_path) -> None:
    name, write = WRITERS[writer]
    victim, out = tmp_path / "victim", tmp_path / "out"
    out.mkdir()
    if kind != "dangling link":
        victim.write_text("precious")
    for path in (out / name, out / f"{name}.partial"):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(victim)
    try:
        write(out / name)
    except (OSError, TorchloomError) as error:
        assert name in str(error)
    else:
        assert not (out / name).is_symlink()
    assert victim.exists() == (kind != "dangling link")
    assert kind == "dangling link" or victim.read_text() == "precious"
    assert not [each for each in out.iterdir() if each.name.startswith(f".{name}.")]


def test_a_file_to_append_to_keeps_what_it_holds(tmp_path) -> None:
    for line in ("a\n", "b\n"):
        with open_to_append(tmp_path / "log") as file:
            file.write(line)
    assert (tmp_path / "log").read_text() == "a\nb\n"
