"""Writes whole weights as safetensors, a part of a tensor at a time: one file, or a folder of files with an index.

    model.safetensors                               up to the size of a shard, or
    model-00001-of-00003.safetensors ...            shards, and
    model.safetensors.index.json                    which weight is in which
    config.json                                     of a model of transformers, for `from_pretrained`

The format is 8 bytes of length, a JSON header, and the tensors' bytes one after the other
(https://huggingface.co/docs/safetensors, "Format").

Weights come from a checkpoint, or from a sharded model. Then all ranks gather, one parameter at a time, and rank 0
writes each before the next one is gathered: no rank holds a whole model. A rank 0 that cannot write goes on to gather,
so that no rank waits for it, and all raise at the end.

An export replaces the one that was there. Readers take model.safetensors if it is there, and else
what the index names, and the files of a second export into one folder get other names than those of the first: one
that is killed at any moment leaves readers the old weights or the new.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchloom.checkpoints import Checkpoints
from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.engine_values import config_of
from torchloom.checkpoints.folder import check_outside
from torchloom.config.budget import parse_bytes
from torchloom.errors import CheckpointError
from torchloom.files import open_partial, replacing, write_whole
from torchloom.log import get_logger
from torchloom.runtime.exchanges import new_agreement
from torchloom.shard import ShardTensor, is_sharded, layout_of, sharded_state_dict
from torchloom.shard.state import gather_shard

_SINGLE = "model.safetensors"
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(
    r"(model|model-\d{5,}-of-\d{5,}(\.[0-9a-f]{8})?)\.safetensors"
    r"|model\.safetensors\.index\.json|\.model[-.].*\.partial"
)
"""Names that an export gives, also one that was killed."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Weight(NamedTuple):
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the file."""
    parts: Callable[[], Iterable[Tensor]]
    """Returns its elements in order, in one tensor or several, of any floating-point dtype where its own is one;
    called once."""

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    weights: Sequence[Weight],
    folder: Path,
    shard_bytes: int,
    config: dict[str, Any] | None = None,
) -> list[Path]:
    """Write weights into a folder; return their files, the index last.

    Args:
        weights: what to write, in this order.
        folder: target; an export that is there is replaced when the new one is complete.
        shard_bytes: size at which a new file begins; a larger tensor has a file of its own.
        config: what config.json is to hold, with the dtype of the files; None leaves the one that is there.

    Raises:
        CheckpointError: a part has another size than its weight; or the target lies in a checkpoint.
        OSError: a file cannot be written.
    """
    check_outside(folder, "weights")
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(weights, shard_bytes)
    names, partials = _names(folder, len(shards)), []
    try:
        for name, shard in zip(names, shards, strict=True):
            with open_partial(folder / name) as file:
                partials.append(Path(file.name))
                _write(file, shard)
        written = [
            partial.replace(folder / name) for partial, name in zip(partials, names, strict=True)
        ]
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    if len(shards) > 1:
        places = {
            weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard
        }
        total = sum(weight.num_bytes for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        written.append(write_whole(folder / _INDEX, json.dumps(index, indent=1) + "\n"))
    _remove_others(folder, {path.name for path in written})
    if config is not None:
        dtypes = {str(each.dtype)[6:] for each in weights if each.dtype.is_floating_point}
        if len(dtypes) == 1:
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config = {**config, key: dtypes.pop()}
        write_whole(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    return written


def write_file(weights: Sequence[Weight], path: Path) -> list[Path]:
    """Write weights into one file, which appears once it is complete; return its path.

    Args:
        weights: what to write, in this order.
        path: `*.safetensors`, or any other suffix for `torch.save`, for which all weights are held.

    Raises:
        CheckpointError: a part has another size than its weight; or the target lies in a checkpoint.
        OSError: the file cannot be written.
    """
    check_outside(path.parent, "weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        if path.suffix == ".safetensors":
            _write(file, weights)
        else:
            whole = {
                each.name: torch.cat([part.to(each.dtype).reshape(-1) for part in each.parts()])
                for each in weights
            }
            torch.save({each.name: whole[each.name].view(each.shape) for each in weights}, file)
    return [path]


def _names(folder: Path, width: int) -> list[str]:
    """Return names for files of weights; an index that is there names none of them."""
    if width == 1:
        return [_SINGLE]
    ident = ""
    while True:
        names = [f"model-{i + 1:05d}-of-{width:05d}{ident}.safetensors" for i in range(width)]
        if not any((folder / name).exists() for name in names):
            return names
        ident = f".{secrets.token_hex(4)}"


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove what older exports left, first what readers look at first."""
    old = [each for each in folder.iterdir() if _WRITTEN.fullmatch(each.name)]
    for each in sorted(old, key=lambda each: (each.name not in (_SINGLE, _INDEX), each.name)):
        if each.name not in kept:
            each.unlink()


def _shards(weights: Sequence[Weight], shard_bytes: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    used = 0
    for weight in weights:
        if shards[-1] and used + weight.num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += weight.num_bytes
    return shards


def _write(file: IO[bytes], weights: Sequence[Weight]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        if weight.dtype not in _NAMES:
            raise CheckpointError(
                f"{weight.name!r} has {weight.dtype}, which safetensors cannot hold: choose a dtype to "
                "write"
            )
        header[weight.name] = {
            "dtype": _NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [offset, offset + weight.num_bytes],
        }
        offset += weight.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for weight in weights:
        written = 0
        for part in weight.parts():
            flat = part.to(weight.dtype).contiguous().reshape(-1).view(torch.uint8)
            content: Any = flat.numpy()
            file.write(content)
            written += flat.numel()
        if written != weight.num_bytes:
            raise CheckpointError(
                f"{weight.name!r} has {written} bytes, its shape says {weight.num_bytes}"
            )


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
    weights = []
    for key, stored in contents.index.items():
        kind, _, name = key.partition("/")
        if kind in ("model", "buffer"):
            kept = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
            weights.append(Weight(name, stored.shape, kept, partial(contents.in_order, key)))
    if not weights:
        raise CheckpointError(f"{contents.path} holds no weights")
    if config is None and isinstance(contents.facts.get("model_config"), dict):
        config = contents.facts["model_config"]
    return write_folder(sorted(weights, key=lambda w: w.name), folder, shard_bytes, config)


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
