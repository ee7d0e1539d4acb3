"""Weights of a checkpoint as safetensors: no model, no process group. Tied weights are written once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom.engine.checkpoints.contents import Contents
from torchloom.engine.checkpoints.weight_files import Weight, check_dtype, write_folder
from torchloom.errors import CheckpointError


def export(
    contents: Contents,
    folder: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
    config: dict[str, Any] | None = None,
) -> list[Path]:
    """Write all weights and buffers, and config.json where there is one; return the files, the index last.

    Args:
        contents: a checkpoint that has been verified.
        folder: target; an export that is there is replaced when the new one is complete.
        dtype: of floating-point weights; None keeps theirs.
        shard_bytes: size at which a new file begins; a larger tensor has a file of its own.
        config: what config.json is to hold; None: what the model had when the checkpoint was saved.

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
        kept = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        check_dtype(name, kept)
        weights.append(Weight(name, stored.shape, kept))
        keys[name] = key
    if not weights:
        raise CheckpointError(f"{contents.path} holds no weights")
    if config is None and isinstance(contents.facts.get("model_config"), dict):
        config = contents.facts["model_config"]
    return write_folder(
        sorted(weights),
        lambda weight: _parts(contents, keys[weight.name]),
        folder,
        shard_bytes,
        config,
    )


def _parts(contents: Contents, key: str) -> Iterator[Tensor]:
    """Yield a tensor in the parts that ranks wrote, in order."""
    for first, numel in contents.payload.ranges(key):
        yield contents.payload.part(key, first, numel)
