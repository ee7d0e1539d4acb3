"""Files that run code when they are unpickled: nothing of them is executed, whatever is loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import shutil
from pathlib import Path

import pytest
import torch

from support.checkpoints import copied, load_all, names_in, outcome, save_steps, state_of
from support.old_checkpoint import save_old
from support.ranks import run_ranks
from support.runs import assert_equal, make_engine, train, weights
from torchloom._torch.dcp import read_dcp_metadata
from torchloom.engine.checkpoints.digests import BLOCK, Sums
from torchloom.engine.checkpoints.manifest import Manifest, read_manifest


class Runs:
    """Writes a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


class ByEval(Runs):
    def __reduce__(self):
        return (eval, (f"open({self.marker!r}, 'w')",))


class ByBuild(Runs):
    def __reduce__(self):
        import importlib

        return (importlib.import_module, ("antigravity_" + Path(self.marker).name,))


def by_torch(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_steps(root, 1)

    def old(rank):
        engine, model = make_engine(3)
        train(engine, rank, 2)
        save_old(engine, root / "old", "v1", {"epoch": 3})
        return weights(model), train(engine, rank, 2, first=2), weights(model)

    return root, run_ranks(2, old)


def seal_again(path) -> None:
    """Give hostile files right digests: whoever can write files can write a manifest."""
    import zlib

    manifest = read_manifest(path)
    files = {}
    for name in manifest.files:
        content = (path / name).read_bytes()
        blocks = [zlib.crc32(content[i : i + BLOCK]) for i in range(0, len(content), BLOCK)]
        files[name] = Sums(len(content), blocks)
    kept = {**vars(manifest), "files": files}
    (path / "manifest.json").write_bytes(Manifest(**kept).to_bytes())


@pytest.mark.parametrize("make", [Runs, ByEval])
@pytest.mark.parametrize("resealed", [False, True])
def test_hostile_pickles_in_every_file(make, resealed, saved, tmp_path) -> None:
    root, marker, cases = saved[0], tmp_path / "marker", []
    for name in names_in(root / "global_step1"):
        for index, content in enumerate((pickle.dumps(make(marker)), by_torch(make(marker)))):
            case = tmp_path / f"{name}-{index}"
            shutil.copytree(root / "global_step1", case / "global_step1")
            (case / "global_step1" / name).write_bytes(content)
            if resealed and name != "manifest.json":
                seal_again(case / "global_step1")
            cases.append(case)
    # A tensor's bytes in the middle of a file that is right otherwise.
    case = tmp_path / "inside"
    shutil.copytree(root / "global_step1", case / "global_step1")
    data = case / "global_step1" / "__0_0.distcp"
    content, bad = data.read_bytes(), by_torch(make(marker))
    index = json.loads((case / "global_step1" / "index.json").read_text())
    chunks = [chunk for entry in index.values() for chunk in entry[2] if chunk[2] == data.name]
    for _, sizes, _, start, length in chunks:
        if sizes != [0]:
            content = content[:start] + bad.ljust(length, b"\0") + content[start + length :]
    data.write_bytes(content)
    seal_again(case / "global_step1")
    cases.append(case)
    names = [case.name for case in cases]

    for found in load_all(cases):
        for name, (text, stayed) in zip(names, found, strict=True):
            if resealed and name.startswith((".metadata", "rank_0.json")):
                continue  # torchloom reads neither: rank 0 has nothing of its own
            assert text.startswith("CheckpointError"), (name, text)
            assert stayed, name
    assert not marker.exists()


def test_the_first_version_loads_and_goes_on_bitwise(saved) -> None:
    root, before = saved

    def fn(rank):
        engine, model = make_engine(3, seed=5)
        _, client = engine.load_checkpoint(root / "old")
        assert client == {"epoch": 3}
        assert engine.global_steps == 2
        loaded = weights(model)
        return loaded, train(engine, rank, 2, first=2), weights(model)

    for (at_save, losses, end), (loaded, again, after) in zip(
        before, run_ranks(2, fn), strict=True
    ):
        assert_equal(at_save, loaded)
        assert losses == again
        assert_equal(end, after)


def test_the_first_version_loads_on_one_rank(saved) -> None:
    def fn(rank):
        engine, model = make_engine(1, seed=5)
        engine.load_checkpoint(saved[0] / "old")
        return weights(model)

    assert_equal(saved[1][0][0], run_ranks(1, fn)[0])


@pytest.mark.parametrize("make", [Runs, ByEval, ByBuild])
def test_hostile_files_of_the_first_version(make, saved, tmp_path) -> None:
    root, marker, cases = saved[0] / "old", tmp_path / "marker", []
    for name in names_in(root / "v1"):
        for index, content in enumerate((pickle.dumps(make(marker)), by_torch(make(marker)))):
            case = copied(root, tmp_path / f"{name}-{index}")
            (case / "v1" / name).write_bytes(content)
            cases.append(case)
    names = [case.name for case in cases]

    for found in load_all(cases):
        for name, (text, stayed) in zip(names, found, strict=True):
            assert text.startswith("CheckpointError"), (name, text)
            assert stayed, name
    assert not marker.exists()


def test_every_global_of_a_pickle_is_refused(saved, tmp_path) -> None:
    """Functions that do harm without looking like it, in the place of a record's class."""
    file = tmp_path / ".metadata"
    for module, name in [
        ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "os"), ("torch.serialization", "load"),
        ("functools", "partial"), ("operator", "attrgetter"), ("torch", "hub.load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
    ]:  # fmt: skip
        text = pickle.PROTO + b"\x04" + b"\x8c" + bytes([len(module)]) + module.encode()
        text += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93" + b"."
        pickletools.dis(text, out=io.StringIO())
        file.write_bytes(text)
        with pytest.raises(pickle.UnpicklingError, match="asks for"):
            read_dcp_metadata(file)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 1, "params": 3},
        {"format": 1},
        {"format": "1"},
        {"format": None},
        {"format": 99},
        {"groups": 5},
        {"groups": [{"params": 3}]},
        {"scaler": []},
        {"scaler": {"scale": "x"}},
        {"scheduler": 5},
        {"world_size": "two"},
        {"micro_steps": None},
        {"client_state": 3},
    ],
)
def test_json_of_wrong_types_in_the_first_version(damage, saved, tmp_path) -> None:
    root = copied(saved[0] / "old", tmp_path / "a")
    file = root / "v1" / "engine.json"
    facts = json.loads(file.read_text())
    facts = (
        damage
        if damage.get("params") or (len(damage) == 1 and "format" in damage)
        else {**facts, **damage}
    )
    file.write_text(json.dumps(facts))

    def fn(rank):
        engine, _ = make_engine(3, seed=4)
        before = state_of(engine)
        return outcome(lambda: engine.load_checkpoint(root)), state_of(engine) == before

    for text, stayed in run_ranks(2, fn):
        assert text.startswith("CheckpointError"), text
        assert stayed
