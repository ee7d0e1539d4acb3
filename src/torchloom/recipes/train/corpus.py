"""The text to train on, split into a training part and a held-out part, and cut into samples.

The default is the source code of the running Python's standard library, which every machine has.
`--data` names a file or a folder instead; it may hold any bytes.

A digest of names and positions decides what is held out: one sixteenth of the blocks, which hold at most 64 KiB
and never parts of two files. The split is the same on every rank, in every run and for every seed.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchloom.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor  # the checks before a run open without torch

MAX_STDLIB_BYTES = 16 << 20
MAX_DATA_BYTES = 1 << 30
_BLOCK_BYTES = 64 << 10
_HELD_OUT_PART = 16
# Tests are repetitive; character tables and generated help texts are neither prose nor code.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text as bytes, in two parts that do not overlap."""

    name: str
    train: bytes
    heldout: bytes
    num_files: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_files} files, {len(self.train) / 1e6:.2f} MB to train on, "
            f"{len(self.heldout) / 1e6:.2f} MB held out"
        )


def load_corpus(path: str | None, *, seq_len: int) -> Corpus:
    """Read and split the text.

    Args:
        path: a file or folder; the standard library's sources when `None`.
        seq_len: bytes per sample; each part must hold at least one sample and the byte after it.

    Raises:
        DataError: the path is missing, unreadable, empty or too small.
    """
    if path is None:
        name, root = "Python standard library", Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in _inside(root, "*.py") if not _STDLIB_EXCLUDED & set(p.parts)]
        limit_bytes = MAX_STDLIB_BYTES
    else:
        name, root, limit_bytes = path, Path(path).expanduser(), MAX_DATA_BYTES
        files = _list_files(root)
    documents = _read(root, files, limit_bytes)
    train, heldout = _split(documents)
    shortest = min(len(train), len(heldout))
    if shortest <= seq_len:
        total = len(train) + len(heldout)
        raise DataError(
            f"data {name!r} holds {total} bytes: too few for samples of {seq_len} in both the "
            f"training and the held-out part (one sixteenth): give more text or a smaller --seq-len"
        )
    return Corpus(name=name, train=train, heldout=heldout, num_files=len(documents))


def _list_files(root: Path) -> list[Path]:
    """Return a file, or those of a folder, relative to it."""
    if root.is_file():
        return [Path()]
    files = [p for p in _inside(root, "*") if not any(part.startswith(".") for part in p.parts)]
    if not files:
        raise DataError(
            f"data path {str(root)!r} is neither a file nor a folder that holds one (hidden ones are not read)"
        )
    return files


def _inside(root: Path, pattern: str) -> list[Path]:
    found = [p.relative_to(root) for p in sorted(root.rglob(pattern)) if p.is_file()]
    return [p for p in found if "__pycache__" not in p.parts]


def _read(root: Path, files: list[Path], limit_bytes: int) -> list[tuple[str, bytes]]:
    """Read whole files in order until `limit_bytes` are reached."""
    documents, total = [], 0
    for name in files:
        path = root / name
        try:
            with path.open("rb") as file:
                content = file.read(limit_bytes - total)
        except OSError as err:
            raise DataError(f"data file {str(path)!r} cannot be read: {err.strerror}") from None
        documents.append((str(name), content))
        total += len(content)
        if total >= limit_bytes:
            break
    if not total:
        raise DataError(f"data {str(root)!r} is empty: there is nothing to train on")
    return documents


def _split(documents: list[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Return the training and the held-out part, each in reading order."""
    total = sum(len(content) for _, content in documents)
    size = max(1, min(_BLOCK_BYTES, total // _HELD_OUT_PART))  # small enough to hold one out
    blocks = {
        f"{name}@{start}": content[start : start + size]
        for name, content in documents
        for start in range(0, len(content), size)
    }
    by_digest = sorted(blocks, key=lambda name: hashlib.sha256(name.encode()).digest())
    heldout = by_digest[: max(1, len(blocks) // _HELD_OUT_PART)]
    train = blocks.keys() - heldout
    return (
        b"".join(content for name, content in blocks.items() if name in train),
        b"".join(content for name, content in blocks.items() if name not in train),
    )


def windows(tokens: Tensor, seq_len: int) -> Tensor:
    """Return a view of `tokens` as rows of `seq_len` + 1; neighbours share one token.

    Raises:
        DataError: there are not enough tokens for a single row.
    """
    if len(tokens) <= seq_len:
        raise DataError(
            f"the text has {len(tokens)} tokens, fewer than one sample of {seq_len} and its label: "
            "give more text or a smaller --seq-len"
        )
    return tokens.unfold(0, seq_len + 1, seq_len)


def heldout_batches(
    rows: Tensor, *, micro_batch: int, rank: int, world_size: int, max_samples: int = 64
) -> list[Tensor]:
    """Return this rank's evaluation batches: rows spread evenly over the held-out text.

    Every rank gets the same number of batches of the same shape, because evaluation uses collectives. A
    text with fewer rows than that is repeated.

    Args:
        rows: the held-out text, by `windows`.
        micro_batch: rows per batch.
        rank: this process among `world_size`.
        world_size: number of ranks.
        max_samples: the most rows of all ranks together, if one batch per rank does not exceed it.
    """
    per_round = micro_batch * world_size
    total = max(1, min(len(rows), max_samples) // per_round) * per_round
    picks = [i * len(rows) // total for i in range(total)]
    starts = range(rank * micro_batch, total, per_round)
    return [rows[picks[start : start + micro_batch]].long() for start in starts]
