"""Weights as safetensors, a part of a tensor at a time: one file, or a folder of files with an index.

    model.safetensors                               up to the size of a shard, or
    model-00001-of-00003.safetensors ...            shards, and
    model.safetensors.index.json                    which weight is in which
    config.json                                     of a model of transformers, for `from_pretrained`

The format is 8 bytes of length, a JSON header, and the tensors' bytes one after the other
(https://huggingface.co/docs/safetensors, "Format").

An export replaces the one that was there. Readers take model.safetensors if it is there, and else
what the index names: an export that is killed at any moment leaves them the old weights or the new.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.folder import check_outside
from torchloom.errors import CheckpointError
from torchloom.files import open_partial, replacing, write_whole

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

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise unless safetensors can hold a dtype.

    Raises:
        CheckpointError: it cannot.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name!r} has {dtype}, which safetensors cannot hold: choose a dtype to write"
        )


Parts = Callable[[Weight], Iterable[Tensor]]
"""Returns a weight's elements in order, in one tensor or several, of any floating-point dtype where its own is one."""


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the config of a model of transformers, or of one alike, as its config.json has it; None of others.

    Args:
        model: has the config as `model.config`.
    """
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_text):
        return None
    return {"architectures": [type(model).__name__], **json.loads(str(to_text()))}


def write_folder(
    weights: Sequence[Weight],
    parts: Parts,
    folder: Path,
    shard_bytes: int,
    config: dict[str, Any] | None = None,
) -> list[Path]:
    """Write weights into a folder; return their files, the index last.

    Args:
        weights: what to write, in this order.
        parts: called for each weight once, in order.
        folder: target; an export that is there is replaced when the new one is complete.
        shard_bytes: size at which a new file begins; a larger tensor has a file of its own.
        config: what config.json is to hold, with the dtype of the files; None leaves the one that is there.

    Raises:
        CheckpointError: a part has another size than its weight; or the target lies in a checkpoint.
        OSError: a file cannot be written.
    """
    check_outside(folder, "weights")
    shards = _shards(weights, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(len(shards))
    partials: list[Path] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            with open_partial(folder / name) as file:
                partials.append(Path(file.name))
                _write(file, shard, parts)
        if len(shards) == 1:
            written = [partials[0].replace(folder / _SINGLE)]
        else:
            written = _place(folder, shards, names, partials)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    _remove_others(folder, {path.name for path in written})
    if config is not None:
        dtypes = {str(each.dtype)[6:] for each in weights if each.dtype.is_floating_point}
        if len(dtypes) == 1:
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config = {**config, key: dtypes.pop()}
        write_whole(folder / _CONFIG, json.dumps(config, indent=2) + "\n")
    return written


def write_file(weights: Sequence[Weight], parts: Parts, path: Path) -> None:
    """Write weights into one file, which appears once it is complete; as `write_folder`."""
    check_outside(path.parent, "weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        _write(file, weights, parts)


def _names(width: int, ident: str = "") -> list[str]:
    if width == 1:
        return [_SINGLE]
    return [f"model-{i + 1:05d}-of-{width:05d}{ident}.safetensors" for i in range(width)]


def _place(
    folder: Path, shards: list[list[Weight]], names: list[str], partials: list[Path]
) -> list[Path]:
    """Give complete files their names, and write the index.

    Where the old index names the same files, it first changes to others with the new weights.
    """
    targets = [folder / name for name in names]
    if not any(target.exists() for target in targets):
        for partial, target in zip(partials, targets, strict=True):
            partial.replace(target)
    else:
        others = _names(len(shards), f".{secrets.token_hex(4)}")
        for partial, other in zip(partials, others, strict=True):
            partial.replace(folder / other)
        _write_index(folder, others, shards)
        for partial, other, target in zip(partials, others, targets, strict=True):
            try:
                partial.hardlink_to(folder / other)
            except OSError:  # the file system has no links
                with (folder / other).open("rb") as source, replacing(partial) as file:
                    shutil.copyfileobj(source, file)
            partial.replace(target)
    return [*targets, _write_index(folder, names, shards)]


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


def _write(file: IO[bytes], weights: Sequence[Weight], parts: Parts) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
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
        for part in parts(weight):
            flat = part.to(weight.dtype).contiguous().reshape(-1).view(torch.uint8)
            content: Any = flat.numpy()
            file.write(content)
            written += flat.numel()
        if written != weight.num_bytes:
            raise CheckpointError(
                f"{weight.name!r} has {written} bytes, its shape says {weight.num_bytes}"
            )


def _write_index(folder: Path, names: list[str], shards: list[list[Weight]]) -> Path:
    place = {
        weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard
    }
    total = sum(weight.num_bytes for shard in shards for weight in shard)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=1)
    return write_whole(folder / _INDEX, text + "\n")


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
