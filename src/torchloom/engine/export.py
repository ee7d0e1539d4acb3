"""Whole weights to one file, gathered one parameter at a time."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from torchloom.shard import full_state_dict, layout_of


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype) -> str:
    """Write the state dict of a sharded model with floating-point weights in `dtype`.

    Tied weights are written once, under their first name, as the format wants.

    Args:
        model: the sharded model; all ranks must call.
        path: `*.safetensors`, or any other suffix for `torch.save`.
        dtype: dtype of floating-point weights in the file.

    Returns:
        The path, on every rank.
    """
    layout = layout_of(model)
    weights = full_state_dict(model, rank0_only=True, cpu=True)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        tied = {".".join(filter(None, owner)) for spec in layout for owner in spec.owners[1:]}
        chosen = {
            name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
            for name, value in weights.items()
            if isinstance(value, Tensor) and name not in tied
        }
        partial = path.with_name(path.name + ".partial")
        if path.suffix == ".safetensors":
            save_file(chosen, partial, metadata={"format": "pt"})
        else:
            torch.save(chosen, partial)
        partial.replace(path)
    dist.barrier()
    return str(path)
