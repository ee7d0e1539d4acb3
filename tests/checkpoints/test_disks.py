"""A full disk, any failure of the system: an error on all ranks, the old checkpoint intact."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import leftovers, outcome, save_steps, state_of
from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom.checkpoints import folder

FILES = [
    f"{name}{rank}{rest}"
    for rank in (0, 1)
    for name, rest in (("__", "_0.distcp"), ("rank_", ".json"))
]
FILES += ["index.json", "engine.json", ".metadata", "manifest.json"]


class Full:
    """A file of which one step fails."""

    def __init__(self, file: Any, step: str) -> None:
        self._file, self._step = file, step

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._step else getattr(self._file, name)

    def _fail(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_under_each_file_is_told_on_both_ranks(tmp_path) -> None:
    save_steps(tmp_path, 1)
    begin = Path.open

    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 1)
        found, before = [], state_of(engine)
        for name, step in product(FILES, ("write", "flush")):

            def opened(path, mode="r", *rest, name=name, step=step):
                file = begin(path, mode, *rest)
                return Full(file, step) if path.name == name and mode == "xb" else file

            Path.open = opened
            found.append(outcome(lambda: engine.save_checkpoint(tmp_path)))
            assert state_of(engine) == before
            assert rank or leftovers(tmp_path) == []
        Path.open = begin
        loaded = outcome(lambda: engine.load_checkpoint(tmp_path))
        train(engine, rank, 1, first=1)
        return found, [loaded, outcome(lambda: engine.save_checkpoint(tmp_path))]

    (first, again), other = run_ranks(2, fn)
    assert (first, again) == other
    assert again == ["done", "done"]
    for (name, step), text in zip(product(FILES, ("write", "flush")), first, strict=True):
        assert text.startswith("CheckpointError"), (name, step, text)
        assert f"rank {int('1' in name)}: " in text, (name, step, text)
        assert text.endswith(f"/{name}: No space left on device"), (name, step, text)


FAILURES = [
    (os, "fsync", 0),
    (os, "fsync", 1),
    (folder, "swap", 0),
    (torch, "save", 0),
    (torch, "save", 1),
]


def test_any_failure_of_the_system(tmp_path) -> None:
    save_steps(tmp_path, 1)

    def fn(rank):
        def fails(*args, **kwargs):
            raise OSError(5, "Input/output error", "/some/path")

        engine, _ = make_engine(3)
        train(engine, rank, 1)
        found = []
        for module, name, who in FAILURES:
            real = getattr(module, name)
            if rank == who:
                setattr(module, name, fails)
            text = outcome(lambda: engine.save_checkpoint(tmp_path))
            setattr(module, name, real)
            found.append((who, text, outcome(lambda: engine.load_checkpoint(tmp_path))))
        return found, outcome(lambda: engine.save_checkpoint(tmp_path))

    for found, again in run_ranks(2, fn):
        assert again == "done"
        for who, text, loaded in found:
            assert f"rank {who}" in text
            assert "Input/output error" in text
            assert loaded == "done"


def test_failures_after_the_rename_are_no_failures(tmp_path) -> None:
    def fn(rank):
        from torchloom.checkpoints import write

        def fails(*args, **kwargs):
            raise OSError(28, "No space left on device", "latest")

        write.write_whole = fails
        engine, _ = make_engine(3)
        train(engine, rank, 1)
        return outcome(lambda: engine.save_checkpoint(tmp_path)), outcome(
            lambda: engine.load_checkpoint(tmp_path)
        )

    assert run_ranks(2, fn) == [("done", "done")] * 2


def test_a_file_in_place_of_the_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("x")

    def fn(rank):
        engine, _ = make_engine(3)
        return (
            outcome(lambda: engine.save_checkpoint(tmp_path / "file")),
            outcome(lambda: engine.save_checkpoint("/proc/nothing/here")),
            outcome(lambda: engine.load_checkpoint(tmp_path / "file")),
            outcome(lambda: engine.load_checkpoint(tmp_path / "none")),
        )

    for found in run_ranks(2, fn):
        for text in found:
            assert text.startswith("CheckpointError"), text
