"""Whatever happens to the files: one error on all ranks that names the file, and nothing is changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

import torchloom
from support.checkpoints import copied, flip_bit, load_all, names_in, outcome, save_steps, state_of
from support.ranks import run_ranks
from support.runs import hears, make_engine, settings


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_steps(root, 1, 2)
    return root


FILES = [
    "manifest.json", "engine.json", "index.json", ".metadata", "__0_0.distcp", "__1_0.distcp",
    "rank_0.json", "rank_1.json",
]  # fmt: skip


def test_the_list_of_files_is_complete(saved) -> None:
    assert names_in(saved / "global_step2") == sorted(FILES)


def test_a_flipped_bit_anywhere(saved, tmp_path) -> None:
    cases, names = [], []
    for index, name in enumerate(FILES):
        for position in ((0.0, 0.62), (0.3, 1.0))[index % 2]:
            root = copied(saved, tmp_path / f"{name}-{position}")
            flip_bit(root / "global_step2" / name, position, bit=int(position * 7))
            cases.append(root)
            names.append(name)
    for found in load_all(cases, "global_step2"):
        for name, (text, stayed) in zip(names, found, strict=True):
            assert text.startswith("CheckpointError"), (name, text)
            assert name in text
            assert stayed, name


def _cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _grow(path):
    with path.open("ab") as file:
        file.write(b"\0")


def _link(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "grown": _grow,
    "missing": lambda path: path.unlink(),
    "a list": lambda path: path.write_text("[1, 2]"),
    "a number": lambda path: path.write_text("7"),
    "other json": lambda path: path.write_text(
        json.dumps({"format": 2, "files": {"a": 1}, "seal": 3})
    ),
    "a link": _link,
    "a folder": _folder,
}


def test_damaged_files(saved, tmp_path) -> None:
    cases, names = [], []
    for index, (kind, damage) in enumerate(DAMAGE.items()):
        # Each kind in some files, and each file in some ways.
        for name in FILES if kind == "missing" else (FILES * 2)[index : index + 6 : 3]:
            root = copied(saved, tmp_path / f"{kind}-{name}")
            damage(root / "global_step2" / name)
            cases.append(root)
            names.append((kind, name))
    for found in load_all(cases, "global_step2"):
        for (kind, name), (text, stayed) in zip(names, found, strict=True):
            assert text.startswith("CheckpointError"), (kind, name, text)
            assert name in text, (kind, text)
            assert stayed, (kind, name)


def test_swapped_and_foreign_files(saved, tmp_path) -> None:
    cases, names = [], []
    for name in FILES:
        root = copied(saved, tmp_path / name)
        shutil.copy(root / "global_step1" / name, root / "global_step2" / name)
        same = (saved / "global_step1" / name).read_bytes() == (
            saved / "global_step2" / name
        ).read_bytes()
        if not same:
            cases.append(root)
            names.append(name)
    assert {"manifest.json", "engine.json", "__0_0.distcp"} <= set(names)
    root = copied(saved, tmp_path / "ranks")
    here = root / "global_step2"
    (here / "__0_0.distcp").rename(here / "x")
    (here / "__1_0.distcp").rename(here / "__0_0.distcp")
    (here / "x").rename(here / "__1_0.distcp")
    cases.append(root)
    names.append("distcp")
    root = copied(saved, tmp_path / "foreign")
    (root / "global_step2" / "__2_0.distcp").write_bytes(b"foreign")
    cases.append(root)
    names.append("__2_0.distcp")
    for found in load_all(cases, "global_step2"):
        for name, (text, stayed) in zip(names, found, strict=True):
            assert text.startswith("CheckpointError"), (name, text)
            assert name in text or name == "manifest.json", (name, text)
            assert stayed, name


def test_without_a_tag_the_newest_that_verifies_is_taken(saved, tmp_path, caplog) -> None:
    root = copied(saved, tmp_path / "a")
    flip_bit(root / "global_step2" / "__1_0.distcp", 0.5)

    def fn(rank):
        records = hears()
        engine, _ = make_engine(3, seed=4)
        path, _ = engine.load_checkpoint(root)
        return path, engine.global_steps, records

    for rank, (path, steps, records) in enumerate(run_ranks(2, fn)):
        assert path.endswith("global_step1")
        assert steps == 1
        if rank == 0:
            assert any("__1_0.distcp" in each and "global_step2" in each for each in records)


def test_nothing_verifies(saved, tmp_path) -> None:
    root = copied(saved, tmp_path / "a")
    for tag in ("global_step1", "global_step2"):
        (root / tag / "rank_1.json").unlink()
    for ((text, stayed),) in load_all([root]):
        assert text.startswith("CheckpointError")
        assert "global_step1" in text
        assert "global_step2" in text
        assert stayed


def test_latest_is_no_authority(saved, tmp_path) -> None:
    """A save that is killed between its last two steps is there; a damaged hint leads nowhere."""
    root = copied(saved, tmp_path / "a")

    def fn(rank):
        engine, _ = make_engine(3, seed=4)
        found = []
        for content in ("global_step1\n", "../../etc\n", "", "\0\xff"):
            (root / "latest").write_text(content)
            found.append(engine.load_checkpoint(root)[0])
        return found

    assert run_ranks(1, fn) == [[str(root / "global_step2")] * 4]


def test_another_model_changes_nothing(saved) -> None:
    def fn(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 17), nn.Linear(17, 2))
        engine, *_ = torchloom.initialize(model=model, config=settings(3))
        before = state_of(engine)
        text = outcome(lambda: engine.load_checkpoint(saved))
        return text, state_of(engine) == before

    for text, stayed in run_ranks(2, fn):
        assert "another model" in text
        assert stayed
