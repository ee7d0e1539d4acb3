"""Files that run code when they are unpickled: nothing of them is executed, whatever is loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil

import pytest
import torch

from support.checkpoints import copied, load_all, names_in, save_steps
from torchloom.checkpoints.manifest import BLOCK, Manifest, Sums, read_manifest


class Runs:
    """Writes a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


class ByEval(Runs):
    def __reduce__(self):
        return (eval, (f"open({self.marker!r}, 'w')",))


def by_torch(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_steps(root, 1)
    return root


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


@pytest.mark.parametrize("resealed", [False, True])
def test_hostile_pickles_in_every_file(resealed, saved, tmp_path) -> None:
    root, marker, cases = saved, tmp_path / "marker", []
    hostile = [pickle.dumps(Runs(marker)), by_torch(ByEval(marker))]
    for name in names_in(root / "global_step1"):
        for index, content in enumerate(hostile):
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
    content, bad = data.read_bytes(), by_torch(Runs(marker))
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


WRONG = [
    *({"format": each} for each in (1, 2, "3", None, 99)),
    *({"params": 3}, {"world_size": "two"}, {"values": 5}, {"own": 3}),
]
WRONG_VALUES = [
    {"groups": 5},
    {"groups": [{"params": 3}]},
    {"scaler": []},
    {"scaler": {"scale": "x"}},
    {"counters": {"global_steps": None}},
    {"counters": 3},
]


def test_other_formats_and_json_of_wrong_types(saved, tmp_path) -> None:
    """Also of a checkpoint whose digests are right: one error, and nothing is changed."""
    cases = []
    for index, wrong in enumerate([*WRONG, *WRONG_VALUES]):
        case = copied(saved, tmp_path / str(index))
        file = case / "global_step1" / "engine.json"
        facts = json.loads(file.read_text())
        (facts if wrong in WRONG else facts["values"]).update(wrong)
        file.write_text(json.dumps(facts))
        seal_again(file.parent)
        cases.append(case)
    unlisted = copied(saved, tmp_path / "unlisted")
    (unlisted / "global_step1" / "manifest.json").unlink()  # of the first format
    for found in load_all([*cases, unlisted]):
        for (text, stayed), wrong in zip(found, [*WRONG, *WRONG_VALUES, None], strict=True):
            assert text.startswith("CheckpointError"), (wrong, text)
            assert stayed, wrong
        for text, _ in found[:2]:
            assert (
                "this version reads 3: load it with the version of torchloom that wrote it" in text
            )
        assert "of a format before 3, which this version does not read" in found[-1][0]
