"""Exports over older exports, killed at any moment, and into the wrong place."""

from __future__ import annotations

import os
import pathlib
import warnings
from pathlib import Path

import pytest
import torch

from support.checkpoints import die_at, names_in, read_export, save_steps
from support.runs import assert_equal
from torchloom.checkpoints.contents import read_contents
from torchloom.checkpoints.save_model import export
from torchloom.errors import CheckpointError

WHOLE, FEW, MANY = 1 << 40, 2000, 600
"""Sizes of a shard, in bytes: one file, a few, more."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_steps(root, 1, 3)
    return [read_contents(root / f"global_step{step}") for step in (1, 3)]


def is_killed_at(call: int, action) -> bool:
    """Run `action` in a process that dies at its n-th operation on the file system."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12+: fork with threads
        pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            names = ("open", "replace", "unlink", "chmod")
            die_at(call, *((pathlib.Path, name) for name in names))
            action()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("new", [WHOLE, FEW, MANY])
@pytest.mark.parametrize("old", [WHOLE, FEW, MANY])
def test_killed_while_an_export_is_replaced(old, new, saved, tmp_path) -> None:
    first, second = saved
    export(first, tmp_path / "old", None, WHOLE)
    export(second, tmp_path / "new", None, new)
    before, after = read_export(tmp_path / "old"), read_export(tmp_path / "new")
    target, seen = tmp_path / "out", set()
    for call in range(1, 200):
        export(first, target, None, old)  # also what a killed one left is cleaned up
        assert_equal(read_export(target), before)
        is_killed = is_killed_at(call, lambda: export(second, target, None, new))
        found = read_export(target)
        is_new = torch.equal(
            found["head.weight" if "head.weight" in found else min(found)],
            after["head.weight" if "head.weight" in after else min(after)],
        )
        assert_equal(found, after if is_new else before)
        seen.add(is_new)
        if not is_killed:
            break
    assert not is_killed
    assert seen == {True, False}
    assert len(names_in(target)) == len(names_in(tmp_path / "new"))


def test_files_of_others_stay(saved, tmp_path) -> None:
    names = ["config.json", "pytorch_model.bin", "model.txt", "adapter_model.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    for size in (MANY, FEW, WHOLE):
        export(saved[0], tmp_path, None, size)
    assert names_in(tmp_path) == sorted([*names, "model.safetensors"])


@pytest.mark.parametrize("below", ["", "weights/16bit"])
def test_into_a_checkpoint(below, saved, tmp_path) -> None:
    path = Path(saved[0].path)
    (tmp_path / "link").symlink_to(path)
    before = names_in(path)
    for target in (path / below, tmp_path / "link" / below):
        with pytest.raises(CheckpointError, match=f"{path} is a checkpoint, which weights in it"):
            export(saved[0], target, None, WHOLE)
    assert names_in(path) == before
