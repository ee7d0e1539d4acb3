"""Whole weights to one file, gathered one parameter at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchloom.engine.checkpoints import Checkpoints
from torchloom.engine.checkpoints.folder import check_outside
from torchloom.shard import Layout, full_state_dict, layout_of


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype, checkpoints: Checkpoints) -> str:
    """Write the state dict of a sharded model with floating-point weights in `dtype`.

    Tied weights are written once, under their first name, as the format wants.

    Args:
        model: the sharded model; all ranks must call.
        path: `*.safetensors`, or any other suffix for `torch.save`.
        dtype: dtype of floating-point weights in the file.
        checkpoints: lets all ranks know how rank 0's writing went.

    Returns:
        The path, on every rank.

    Raises:
        CheckpointError: the file cannot be written; on every rank. What was there stays.
    """
    layout = layout_of(model)
    weights = full_state_dict(model, rank0_only=True, cpu=True)
    checkpoints.on_rank0(
        "the weights to export",
        f"the weights cannot be written to {str(path)!r}",
        lambda: _write(weights, layout, path, dtype),
    )
    return str(path)


def _write(weights: dict[str, Tensor], layout: Layout, path: Path, dtype: torch.dtype) -> None:
    check_outside(path.parent, "weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    tied = {".".join(filter(None, owner)) for spec in layout for owner in spec.owners[1:]}
    chosen, held = {}, set()
    for name, value in weights.items():
        if isinstance(value, Tensor) and name not in tied:
            each = (value.to(dtype) if value.is_floating_point() else value).contiguous()
            memory = each.untyped_storage().data_ptr()
            # Buffers may share memory, which the format refuses.
            chosen[name] = each.clone() if memory in held else each
            held.add(memory)
    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".safetensors":
            save_file(chosen, partial, metadata={"format": "pt"})
        else:
            torch.save(chosen, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
