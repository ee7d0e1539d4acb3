"""Writes the snapshots of all ranks into one checkpoint: all ranks succeed, or all fail.

    open      rank 0 takes the lock, removes leftovers, makes the folder, and tells its token and its values' digests
    write     every rank its own files, brought to the disk; values that differ from rank 0's are among them
    publish   rank 0 joins the index, writes the manifest and renames the folder

After the rename the save has succeeded. If cleaning up then fails, such as removing the old checkpoint, a
warning is logged.
"""

from __future__ import annotations

import io
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchloom
from torchloom._torch.dcp import write_dcp_metadata
from torchloom.checkpoints import folder
from torchloom.checkpoints.choose import next_serial, prune
from torchloom.checkpoints.contents import (
    FORMAT,
    Index,
    PayloadPart,
    content_of,
    merged,
    named_for_others,
    read_index,
)
from torchloom.checkpoints.lock import FOLDERS
from torchloom.checkpoints.manifest import NAME, Manifest, Sums, write_summed
from torchloom.checkpoints.rank_task import RankTask
from torchloom.checkpoints.snapshot import OWNED, EngineSnapshot
from torchloom.errors import CheckpointError
from torchloom.files import sync_folder, write_whole
from torchloom.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """Where and how to save."""

    root: Path
    """Relative as long as the caller waits, absolute once the save begins."""
    tag: Any
    """A name or a number, until it is checked."""
    is_latest: bool = True
    keep_last: int | None = None

    @property
    def failure(self) -> str:
        """The beginning of a message that says that it failed."""
        return f"checkpoint {self.tag!r} cannot be saved into {str(self.root)!r}"


def write(snapshot: EngineSnapshot, request: Request, owner: object, ranks: RankTask) -> None:
    """Write a checkpoint; all ranks call, and all return or raise.

    Args:
        snapshot: this rank's state.
        request: folder, tag, and how many checkpoints to keep.
        owner: stands for the engine, whose right to write into the folder it keeps.
        ranks: the exchange of this save between all ranks.

    Raises:
        CheckpointError: a rank failed; what was under the tag is still there.
        PeerLostError: a rank has ended.
    """
    failure = request.failure
    own = folder.working(request.root, "partial", request.tag)
    try:
        told = ranks.together(
            failure, lambda: _open(snapshot, own, request, owner) if ranks.rank == 0 else None
        )[0]
        path = request.root / told["name"]
        sums = ranks.together(failure, lambda: _write_own(snapshot, path, told, ranks.rank))
        ranks.together(
            failure, lambda: _publish(snapshot, request, path, sums) if ranks.rank == 0 else None
        )
    finally:
        if ranks.rank == 0 and own.exists():  # of a save that failed
            folder.remove(own)


def _open(snapshot: EngineSnapshot, path: Path, request: Request, owner: object) -> dict[str, Any]:
    """Make the folder; return what the other ranks know it by, and compare with."""
    root, tag = request.root, request.tag
    folder.check_outside(root, "another one")
    root.mkdir(parents=True, exist_ok=True)
    FOLDERS.take(root, owner)
    with FOLDERS.alone:
        folder.clean(root)
        folder.check_replaceable(root / tag)
        path.mkdir()
    token = f"token-{secrets.token_hex(8)}"
    (path / token).touch()
    facts = {"kinds": snapshot.kinds, "digests": snapshot.digests()}
    return {"name": path.name, "token": token, **facts}


def _write_own(snapshot: EngineSnapshot, path: Path, told: dict[str, Any], rank: int) -> Sums:
    """Write this rank's files, with the values of which it keeps its own; return the sums of the last one."""
    if not (path / told["token"]).exists():
        raise CheckpointError(
            f"{path.parent} is not the folder that rank 0 writes to: checkpoints need a folder that all "
            "ranks share. Save to a shared file system"
        )
    if snapshot.kinds != told["kinds"]:
        raise CheckpointError(
            "the ranks hold optimizer states or gradients of different parameters, of which no whole can "
            "be made: call it on all ranks after the same step"
        )
    chosen, prefix = snapshot.values, ""
    if rank:
        first, prefix = told["digests"], f"rank{rank}/"
        own = [name for name, digest in snapshot.digests().items() if first.get(name) != digest]
        chosen = {name: snapshot.values[name] for name in sorted(own)}
    parts = snapshot.parts + [
        PayloadPart(f"{prefix}{key}", tensor, tuple(tensor.shape))
        for value in chosen.values()
        for key, tensor in value.tensors.items()
    ]
    name, index = f"__{rank}_0.distcp", Index()
    sums = write_summed(path / name, content_of(parts, name, index))
    facts = {
        "values": {name: each.tree for name, each in chosen.items()} if rank else {},
        "tensors": index,
        "files": {name: sums},
    }
    return write_summed(path / f"rank_{rank}.json", _text(facts))


def _publish(
    snapshot: EngineSnapshot, request: Request, path: Path, sums: list[tuple[int, list[int]]]
) -> None:
    """Let the checkpoint appear.

    Args:
        snapshot: of rank 0.
        request: where.
        path: its folder.
        sums: those of each rank's last file.
    """
    with FOLDERS.alone:
        manifest = _finish_files(snapshot, request, path, [Sums(*each) for each in sums])
        for token in path.glob("token-*"):
            token.unlink()
        write_summed(path / NAME, [manifest.to_bytes()])
        sync_folder(path)
        _tidy(request, folder.publish(path, request.root / request.tag))


def _finish_files(
    snapshot: EngineSnapshot, request: Request, path: Path, rank_files: list[Sums]
) -> Manifest:
    files: dict[str, Sums] = {}
    indices, own = [], set()
    values = {name: value.tree for name, value in snapshot.values.items()}
    for rank, sums in enumerate(rank_files):
        name = f"rank_{rank}.json"
        facts = json.loads((path / name).read_bytes())
        files |= {name: sums, **{each: Sums(*of) for each, of in facts["files"].items()}}
        indices.append(facts["tensors"])
        own |= facts["values"].keys() - {OWNED}
        values |= facts["values"].get(OWNED, {})
    values |= values.pop(OWNED, {})
    index, metadata = merged(indices), io.BytesIO()
    write_dcp_metadata(metadata, dict(named_for_others(read_index(index), snapshot.tied)))
    facts = {
        "format": FORMAT,
        **snapshot.facts,
        "values": values,
        "own": sorted(own),
    }
    for name, content in {
        "index.json": _text(index),
        "engine.json": _text(facts, indent=1),
        ".metadata": [metadata.getvalue()],
    }.items():
        files[name] = write_summed(path / name, content)
    return Manifest(
        files=files,
        tag=request.tag,
        serial=next_serial(request.root),
        saved_at=time.time(),
        world_size=len(rank_files),
        is_latest=request.is_latest,
        facts={"torchloom": torchloom.__version__, "step": snapshot.facts["global_steps"]},
    )


def _tidy(request: Request, replaced: Path | None) -> None:
    """Do what may fail without harm: the checkpoint is there."""
    root = request.root
    try:
        sync_folder(root)
        if request.is_latest:
            write_whole(root / folder.LATEST, f"{request.tag}\n")
        if replaced is not None:
            folder.remove(replaced)
        if request.keep_last is not None:
            prune(root, request.keep_last)
    except Exception as error:  # noqa: BLE001  the checkpoint is there, whatever others are
        logger.warning("checkpoint %s is saved, but: %s", root / request.tag, error)


def _text(facts: Any, indent: int | None = None) -> list[bytes]:
    return [(json.dumps(facts, indent=indent) + "\n").encode()]
