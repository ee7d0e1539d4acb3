"""Which size of each result varies with the rows, so that padding can be cut off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ProofError
from torchloom.serve.builder.compare.differences import is_array, parts_of
from torchloom.serve.call.padded import Axes, map_tensors


def axes_of(small: Any, large: Any, sizes: tuple[int, int], name: str) -> Axes:
    """Return where a dim is in a result, from results for two sizes of it.

    Args:
        small: a result for few rows.
        large: a result for more rows.
        sizes: how many rows these were for.
        name: of the dim, for the message.

    Raises:
        ProofError: a size grows with the dim, but not in proportion.
    """
    found: Axes = {}
    one: dict[str, Tensor] = {}
    map_tensors(small, lambda path, tensor: one.setdefault(path, tensor))

    def look(path: str, tensor: Tensor) -> Tensor:
        before = one.get(path)
        if before is None or before.dim() != tensor.dim():
            raise ProofError(
                f"result{path} has another rank for other sizes of {name}: it cannot be cut"
            )
        for place, (low, high) in enumerate(zip(before.shape, tensor.shape, strict=True)):
            if low == high:
                continue
            if path in found or low * sizes[1] != high * sizes[0] or low % sizes[0]:
                raise ProofError(
                    f"result{path} has sizes {list(before.shape)} for {name} {sizes[0]}, "
                    f"{list(tensor.shape)} for {sizes[1]}: padding cannot be cut off"
                )
            found[path] = (place, low // sizes[0])
        return tensor

    map_tensors(large, look)
    return found


def uncut_in(value: Any, path: str = "result") -> str:
    """Say what holds tensors in a result, and is of a kind that `map_tensors` does not look into; "" if nothing."""
    if isinstance(value, Tensor):
        return ""
    is_known = isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value)
    is_object = not isinstance(value, type)
    if is_known and is_object:
        found = (uncut_in(each, f"{path}{name}") for name, each in (parts_of(value) or {}).items())
        return next(filter(None, found), "")
    if _holds_tensors(value, frozenset()):
        return f"{path} is a {type(value).__name__} that holds tensors"
    if isinstance(value, Iterator):
        return f"{path} is a {type(value).__name__}"
    return ""


def _holds_tensors(value: Any, within: frozenset[int]) -> bool:
    if isinstance(value, Tensor) or is_array(value):
        return True
    if id(value) in within or isinstance(value, torch.nn.Module):
        return False
    inner = [*(parts_of(value) or {}).values()]
    inner += value if isinstance(value, AbstractSet) else ()
    return any(_holds_tensors(each, within | {id(value)}) for each in inner)
