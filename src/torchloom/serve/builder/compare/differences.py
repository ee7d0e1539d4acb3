"""The first difference of two results: nested values, tensors within a tolerance, objects by their attributes."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of the largest value in a tensor. What is looked for are other results, not other roundings: kernels that
sum in another order differ by a few units in the last place per layer."""


@dataclass(frozen=True)
class Difference:
    """What two results differ in."""

    path: str
    text: str
    is_of_values: bool = False
    """Whether all but the values of a tensor is equal."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def first_difference(  # noqa: PLR0911 - one answer for each kind
    wanted: Any, found: Any, path: str, within: frozenset[int] = frozenset()
) -> Difference | None:
    """Return the first difference of two nested values.

    Args:
        wanted: of the model.
        found: of the program.
        path: what it is called in messages.
        within: the values around it, by identity: one may hold itself.

    Returns:
        None if there is none.

    Raises:
        ServeError: they hold something that cannot be compared.
    """
    if type(wanted) is not type(found) and not isinstance(wanted, Tensor):
        return Difference(path, f"{type(wanted).__name__}, compiled {type(found).__name__}")
    if wanted is found or id(wanted) in within:
        return None
    if _is_array(wanted):
        wanted, found = torch.tensor(wanted), torch.tensor(found)
    if isinstance(wanted, Tensor):
        if not isinstance(found, Tensor):
            return Difference(path, f"a tensor, compiled {found!r}")
        text = _tensors(wanted, found)
        is_of_values = (wanted.shape, wanted.dtype) == (found.shape, found.dtype)
        return Difference(path, text, is_of_values) if text else None
    ours, theirs = parts_of(wanted), parts_of(found)
    if ours is None or theirs is None:
        return _of_leaves(wanted, found, path)
    if ours.keys() != theirs.keys():
        return Difference(path, f"parts {list(ours)}, compiled {list(theirs)}")
    inner = within | {id(wanted)}
    differences = (
        first_difference(each, theirs[name], f"{path}{name}", inner) for name, each in ours.items()
    )
    return next(filter(None, differences), None)


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return what a value holds, by the steps that lead there; None if it does not hold things by name or place."""
    attributes = {f".{name}": each for name, each in getattr(value, "__dict__", {}).items()}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()} | attributes
    if isinstance(value, (list, tuple, collections.deque)):
        return {f"[{place}]": each for place, each in enumerate(value)} | attributes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f".{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
        return fields | attributes
    is_leaf = callable(value) or isinstance(
        value, (enum.Enum, types.ModuleType, collections.abc.Set, Iterator)
    )
    return attributes if hasattr(value, "__dict__") and not is_leaf else None


def _of_leaves(wanted: Any, found: Any, path: str) -> Difference | None:
    """Compare what is no container, by its own `==`."""
    holds_tensors = isinstance(wanted, collections.abc.Set) and any(
        isinstance(each, Tensor) for each in wanted
    )
    is_same = wanted == found
    if holds_tensors or type(wanted).__eq__ is object.__eq__ or not isinstance(is_same, bool):
        kind = f"{type(wanted).__name__}{' of tensors' if holds_tensors else ''}"
        raise ServeError(
            f"{path} is or holds a {kind}, which cannot be compared with the program's: return tensors in tuples, "
            "lists, dicts or objects"
        )
    is_nan = wanted != wanted and found != found
    return None if is_same or is_nan else Difference(path, f"{wanted!r}, compiled {found!r}")


def _tensors(wanted: Tensor, found: Tensor) -> str:
    if wanted.shape != found.shape:
        return f"sizes {list(wanted.shape)}, compiled {list(found.shape)}"
    if wanted.dtype != found.dtype:
        return f"{wanted.dtype}, compiled {found.dtype}"
    if not wanted.numel():
        return ""
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return "" if torch.equal(wanted, found) else "other values"
    if wanted.is_floating_point() and wanted.itemsize == 1:
        wanted, found = wanted.float(), found.float()  # for which few operators are there
    if not torch.equal(torch.isfinite(wanted), torch.isfinite(found)):
        return "not finite in other places"
    a, b = torch.nan_to_num(wanted.detach()), torch.nan_to_num(found.detach())
    largest = a.abs().max().double()
    error = (a - b).abs().max().double()
    allowed = _TOLERANCE.get(wanted.dtype, 1e-1) * max(float(largest), 1e-6)
    return "" if float(error) <= allowed else f"values up to {largest:.4g} differ by {error:.4g}"


def _is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy's that a tensor can hold."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf"
