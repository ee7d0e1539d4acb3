"""Write the snapshots of all ranks into one checkpoint: all ranks succeed, or all fail.

    open      rank 0 takes the lock, removes leftovers, makes the folder; all look for its token
    compare   values that differ from rank 0's are kept by each rank
    write     every rank its own files, brought to the disk
    publish   rank 0 joins the index, writes the manifest and renames the folder

After the rename the save has succeeded. If cleaning up then fails, such as removing the old checkpoint, a
warning is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchloom
from torchloom._torch.dcp import StoredTensor, write_dcp_metadata
from torchloom.checkpoints import folder, rng
from torchloom.checkpoints.choose import next_serial, prune
from torchloom.checkpoints.contents import FORMAT
from torchloom.checkpoints.lock import FolderLock, Hold
from torchloom.checkpoints.manifest import NAME, Manifest, SummedFile, Sums, write_summed
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.tensors import (
    PayloadPart,
    from_json,
    merged,
    to_json,
    write_parts,
)
from torchloom.checkpoints.together import SaveExchange
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


def write(
    snapshot: EngineSnapshot, request: Request, lock: FolderLock, ranks: SaveExchange
) -> None:
    """Write a checkpoint; all ranks call, and all return or raise.

    Args:
        snapshot: this rank's state.
        request: folder, tag, and how many checkpoints to keep.
        lock: the engine's right to write into the folder.
        ranks: the exchange of this save between all ranks.

    Raises:
        CheckpointError: a rank failed; what was under the tag is still there.
        PeerLostError: a rank has ended.
    """
    job = _Job(snapshot, request, lock, ranks)
    try:
        own = job.compare(job.open())
        job.write_files(own)
        job.publish()
    finally:
        job.end()


class _Job:
    def __init__(
        self, snapshot: EngineSnapshot, request: Request, lock: FolderLock, ranks: SaveExchange
    ) -> None:
        self.snapshot, self.request, self.ranks, self._lock = snapshot, request, ranks, lock
        self.partial: Path | None = None
        self._hold = Hold()
        self._ident = ""
        self._rank_files: list[Sums] = []
        self._digests: dict[str, str] = {}

    @property
    def _folder(self) -> Path:
        assert self.partial is not None, "the folder is made first"
        return self.partial

    def open(self) -> str:
        """Make the folder on rank 0 and see on all ranks that it is the same one."""
        told = self.ranks.together(
            self.request.failure, lambda: self._make_folder() if self.ranks.rank == 0 else None
        )
        self._ident = told[0]["ident"]
        self.partial = folder.working(self.request.root, "partial", self.request.tag, self._ident)
        return told[0]["token"]

    def _make_folder(self) -> dict[str, str]:
        root, tag = self.request.root, self.request.tag
        folder.check_outside(root, "another one")
        root.mkdir(parents=True, exist_ok=True)
        self._hold = self._lock.take(root)
        with self._hold.alone:
            folder.clean(root, self._hold.living)
            folder.check_replaceable(root / tag)
            self._ident, token = secrets.token_hex(4), secrets.token_hex(8)
            self._hold.living.add(self._ident)
            self.partial = folder.working(root, "partial", tag, self._ident)
            self.partial.mkdir()
        (self.partial / f"token-{token}").touch()
        return {"ident": self._ident, "token": token}

    def compare(self, token: str) -> list[str]:
        """Return the names of values of which this rank keeps its own.

        Raises:
            CheckpointError: ranks hold states or gradients of different parameters.
        """
        told = self.ranks.together(self.request.failure, lambda: self._look(token))
        if len({pieces for pieces, _ in told}) > 1:
            raise CheckpointError(
                f"{self.request.failure}: the ranks hold optimizer states or gradients of different "
                "parameters, of which no whole can be made: call it on all ranks after the same step"
            )
        if len({values for _, values in told}) == 1:
            return []
        mine = self._digests
        first = self.ranks.together(
            self.request.failure, lambda: mine if self.ranks.rank == 0 else None
        )[0]
        return sorted(name for name, digest in mine.items() if first.get(name) != digest)

    def _look(self, token: str) -> list[str]:
        if not (self._folder / f"token-{token}").exists():
            raise CheckpointError(
                f"{self.request.root} is not the folder that rank 0 writes to: checkpoints need a "
                "folder that all ranks share. Save to a shared file system"
            )
        self._digests = {name: value.digest() for name, value in self.snapshot.values.items()}
        whole = hashlib.sha256(json.dumps(sorted(self._digests.items())).encode())
        return [self.snapshot.pieces, whole.hexdigest()]

    def write_files(self, own: list[str]) -> None:
        """Write this rank's files."""
        told = self.ranks.together(self.request.failure, lambda: self._write_own(own))
        self._rank_files = [Sums(size, blocks) for size, blocks in told]

    def _write_own(self, own: list[str]) -> Sums:
        snapshot, rank, path = self.snapshot, self.ranks.rank, self._folder
        chosen = snapshot.values if rank == 0 else {name: snapshot.values[name] for name in own}
        prefix = "" if rank == 0 else f"rank{rank}/"
        parts = snapshot.parts + [
            PayloadPart(f"{prefix}{key}", tensor, tuple(tensor.shape))
            for value in chosen.values()
            for key, tensor in value.tensors.items()
        ]
        files: dict[str, Sums] = {}
        data = f"__{rank}_0.distcp"
        with contextlib.closing(SummedFile(path / data)) as file:
            tensors = write_parts(file, parts)
            files[data] = file.finish()
        files[rng.file_name(rank)] = write_summed(path / rng.file_name(rank), snapshot.generators)
        facts = {
            "values": {} if rank == 0 else {name: each.tree for name, each in chosen.items()},
            "tensors": to_json(tensors),
            "files": files,
        }
        return write_summed(path / f"rank_{rank}.json", _text(facts))

    def publish(self) -> None:
        """Let the checkpoint appear."""
        self.ranks.together(
            self.request.failure, lambda: self._publish() if self.ranks.rank == 0 else None
        )

    def end(self) -> None:
        """Remove what is left of a save that failed."""
        if self.partial is not None and self.ranks.rank == 0:
            folder.remove(self.partial)
        self._hold.living.discard(self._ident)

    def _publish(self) -> None:
        with self._hold.alone:
            path = self._folder
            manifest = self._finish_files()
            for token in path.glob("token-*"):
                token.unlink()
            write_summed(path / NAME, manifest.to_bytes())
            sync_folder(path)
            final = self.request.root / self.request.tag
            replaced = folder.publish(path, final, self._ident)
            self.partial = None
            self._tidy(replaced)

    def _finish_files(self) -> Manifest:
        snapshot, path, world_size = self.snapshot, self._folder, self.ranks.world_size
        files: dict[str, Sums] = {}
        indices, own = [], set()
        for rank, sums in enumerate(self._rank_files):
            name = f"rank_{rank}.json"
            facts = json.loads((path / name).read_bytes())
            files[name] = sums
            files.update({each: Sums(*of) for each, of in facts["files"].items()})
            indices.append(from_json(facts["tensors"]))
            own |= facts["values"].keys()
        index = merged(indices)
        metadata = io.BytesIO()
        write_dcp_metadata(metadata, dict(named_for_others(index, snapshot.tied)))
        facts = {
            "format": FORMAT,
            **snapshot.facts,
            "values": {name: value.tree for name, value in snapshot.values.items()},
            "own": sorted(own),
        }
        for name, content in {
            "index.json": _text(to_json(index)),
            "engine.json": _text(facts, indent=1),
            ".metadata": metadata.getvalue(),
        }.items():
            files[name] = write_summed(path / name, content)
        return Manifest(
            files=files,
            tag=self.request.tag,
            serial=next_serial(self.request.root),
            saved_at=time.time(),
            world_size=world_size,
            is_latest=self.request.is_latest,
            facts={"torchloom": torchloom.__version__, "step": snapshot.facts["global_steps"]},
        )

    def _tidy(self, replaced: Path | None) -> None:
        """Do what may fail without harm: the checkpoint is there."""
        root, request = self.request.root, self.request
        try:
            sync_folder(root)
            if request.is_latest:
                write_whole(root / folder.LATEST, f"{request.tag}\n")
        except OSError as error:
            logger.warning("checkpoint %s is saved, but: %s", root / request.tag, error)
        if replaced is not None:
            folder.remove(replaced)
        if request.keep_last is not None:
            try:
                prune(root, request.keep_last, self._ident)
            except Exception as error:  # noqa: BLE001  the checkpoint is there, whatever others are
                logger.warning(
                    "checkpoint %s is saved, but not all old ones are removed: %s",
                    root / request.tag,
                    error,
                )


def _text(facts: Any, indent: int | None = None) -> bytes:
    return (json.dumps(facts, indent=indent) + "\n").encode()


def named_for_others(
    index: Mapping[str, StoredTensor], tied: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], StoredTensor]]:
    """Yield the tensors of an index with the path that each has in a nested state dict of other programs.

    Weights and buffers have the names of `model.state_dict()`, also each other name of a tied weight; optimizer
    states those of `{"optim": get_optimizer_state_dict(model, optimizer)}`. They stand in `.metadata` alone.

    Args:
        index: of a checkpoint, by its own names.
        tied: other names of parameters and buffers; see `tied_names`.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    for key, stored in index.items():
        kind, _, rest = key.partition("/")
        if kind in ("model", "buffer"):
            for name in (rest, *aliases.get(rest, ())):
                yield (name,), stored
        elif kind == "optim":
            param, _, state = rest.rpartition("/")
            yield ("optim", "state", param, state), stored
        else:
            yield (key,), stored
