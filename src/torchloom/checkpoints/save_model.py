"""Writes whole weights of a sharded model to files, gathered one parameter at a time: no rank holds a whole model.

All ranks gather, and rank 0 writes each weight into its file before the next one is gathered. A rank 0 that cannot
write goes on to gather, so that no rank waits for it, and all raise at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchloom.checkpoints import Checkpoints
from torchloom.checkpoints.weight_files import (
    Weight,
    config_of,
    write_file,
    write_folder,
)
from torchloom.config.budget import parse_bytes
from torchloom.log import get_logger
from torchloom.runtime.exchanges import new_agreement
from torchloom.shard import ShardTensor, is_sharded, layout_of, sharded_state_dict
from torchloom.shard.state import gather_shard

logger = get_logger(__name__)


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Write the weights of a sharded model as safetensors; all ranks must call.

    The folder gets `model.safetensors`, or several files and `model.safetensors.index.json`, which transformers'
    `from_pretrained` and other readers take, and `config.json` where `model.config` is one of transformers. An
    export that is there is replaced when the new one is complete; other files stay. Tied weights are written once, under their first name.

    Args:
        model: a sharded model.
        folder: where rank 0 writes.
        dtype: of floating-point weights in the files; None keeps theirs.
        max_shard_size: bytes, or text such as "5GB", at which a new file begins; a larger weight has a file of
            its own.

    Returns:
        The paths of the files of weights, the index last; on every rank.

    Raises:
        ShardError: the model is not sharded.
        CheckpointError: a file cannot be written, or a weight has a dtype that safetensors lacks; on every rank.

    Example:
        >>> torchloom.save_model(model, "export", dtype=torch.bfloat16)  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained("export")  # doctest: +SKIP
    """
    if not is_sharded(model):  # a copy of a sharded model is no root
        layout_of(model)
    shard_bytes = parse_bytes(max_shard_size, "max_shard_size")
    checkpoints = Checkpoints(new_agreement(dist.get_rank(), dist.get_world_size()))
    folder = Path(folder)

    return _save(
        model,
        folder,
        dtype,
        checkpoints,
        lambda weights: write_folder(weights, folder, shard_bytes, config_of(model)),
    )


def save_file(model: nn.Module, path: Path, dtype: torch.dtype, checkpoints: Checkpoints) -> str:
    """Write the weights of a sharded model to one file.

    Args:
        model: the sharded model; all ranks must call.
        path: `*.safetensors`, or any other suffix for `torch.save`, for which rank 0 holds all weights.
        dtype: dtype of floating-point weights in the file.
        checkpoints: lets all ranks know how rank 0's writing went.

    Returns:
        The path, on every rank.

    Raises:
        CheckpointError: the file cannot be written; on every rank. What was there stays.
    """
    _save(model, path, dtype, checkpoints, lambda weights: write_file(weights, path))
    return str(path)


def _save(
    model: nn.Module,
    target: Path,
    dtype: torch.dtype | None,
    checkpoints: Checkpoints,
    write: Callable[[list[Weight]], list[Path]],
) -> list[str]:
    """Gather on all ranks while rank 0 writes; return what `write` returned there, as texts."""
    values: dict[str, Tensor] = {}
    weights: list[Weight] = []

    def gathered() -> Iterator[Tensor]:
        for name, value in values.items():
            yield _whole(name, value)

    whole = gathered()

    def look() -> dict[str, str]:
        values.update(_values(model))
        for name, value in values.items():
            kept = dtype if dtype is not None and value.is_floating_point() else value.dtype
            weights.append(Weight(name, tuple(value.shape), kept, lambda: [next(whole)]))
        return {"path": str(target), "dtype": str(dtype)}

    def run() -> list[str]:
        try:
            return [str(path) for path in write(weights)] if dist.get_rank() == 0 else []
        finally:
            for _ in whole:  # the other ranks gather all
                pass

    failure = f"the weights cannot be written to {str(target)!r}"
    return checkpoints.in_step("the weights to export", failure, look, run)[0]


def _whole(name: str, value: Tensor) -> Tensor:
    """Return a weight on the CPU, gathered if `value` is this rank's shard of it."""
    if isinstance(value, ShardTensor):
        value = gather_shard(value, f"{name} to export")
    return value.detach().cpu()


def _values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what the state dict holds, tied weights once."""
    seen: dict[int, str] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, value in sharded_state_dict(model).items():
        if not isinstance(value, Tensor):
            logger.warning("%s of the state dict is no tensor and is left out", name)
        elif name not in params or seen.setdefault(id(params[name]), name) == name:
            yield name, value
