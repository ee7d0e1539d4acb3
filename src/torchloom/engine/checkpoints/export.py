"""Weights of a checkpoint as safetensors: no model, no process group. Tied weights are written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from torchloom.engine.checkpoints.contents import Contents
from torchloom.engine.checkpoints.weight_files import Weight, check_dtype, write_folder
from torchloom.errors import CheckpointError


def export(
    contents: Contents, folder: Path, dtype: torch.dtype | None, shard_bytes: int
) -> list[Path]:
    """Write all weights and buffers; return the files, the index last.

    Args:
        contents: a checkpoint that has been verified.
        folder: target; an export that is there is replaced when the new one is complete.
        dtype: of floating-point weights; None keeps theirs.
        shard_bytes: size at which a new file begins; a larger tensor has a file of its own.

    Raises:
        CheckpointError: a weight cannot be read, or written as safetensors; or the target lies in a
            checkpoint.
        OSError: a file cannot be written.
    """
    keys: dict[str, str] = {}
    weights = []
    for key, stored in contents.payload.index.items():
        kind, _, name = key.partition("/")
        if kind not in ("model", "buffer"):
            continue
        shape = tuple(contents.params[name]) if kind == "model" else stored.shape
        kept = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        check_dtype(name, kept)
        weights.append(Weight(name, shape, kept))
        keys[name] = key
    if not weights:
        raise CheckpointError(f"{contents.path} holds no weights")
    return write_folder(
        sorted(weights), lambda weight: _parts(contents, keys[weight.name]), folder, shard_bytes
    )


def _parts(contents: Contents, key: str) -> Iterator[Tensor]:
    """Yield a tensor in the parts that ranks wrote, in order."""
    for first, numel in contents.payload.ranges(key):
        yield contents.payload.part(key, first, numel)
