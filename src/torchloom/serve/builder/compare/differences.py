"""The first difference of two results: nested values, tensors within a tolerance, objects by their attributes."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ServeError
from torchloom.serve.model.spelling import NotExactError, exact

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


def first_difference(wanted: Any, found: Any, path: str) -> Difference | None:
    """Return the first difference of two nested values.

    Args:
        wanted: of the model.
        found: of the program.
        path: what it is called in messages.

    Returns:
        None if there is none.

    Raises:
        ServeError: they hold something that cannot be compared.
    """
    return _difference(wanted, found, path, frozenset())


def _difference(  # noqa: PLR0911 - one answer for each kind
    wanted: Any, found: Any, path: str, within: frozenset[int]
) -> Difference | None:
    if isinstance(wanted, Tensor):
        text = (
            _tensors(wanted, found)
            if isinstance(found, Tensor)
            else f"a tensor, compiled {found!r}"
        )
        is_of_values = isinstance(found, Tensor) and (wanted.shape, wanted.dtype) == (
            found.shape,
            found.dtype,
        )
        return Difference(path, text, is_of_values) if text else None
    if type(wanted) is not type(found):
        return Difference(path, f"{type(wanted).__name__}, compiled {type(found).__name__}")
    if wanted is found or id(wanted) in within:
        return None
    if isinstance(wanted, _VALUES):
        is_same = wanted == found or (wanted != wanted and found != found)
        return None if is_same else Difference(path, f"{wanted!r}, compiled {found!r}")
    if is_array(wanted):
        same = wanted.shape == found.shape and wanted.dtype == found.dtype
        if not same or wanted.dtype.kind not in "biuf":
            is_same = same and bool((wanted == found).all())
            return None if is_same else Difference(path, "another array")
        return _difference(torch.tensor(wanted), torch.tensor(found), path, within)
    ours, theirs = parts_of(wanted), parts_of(found)
    if ours is None or theirs is None:
        return _by_spelling(wanted, found, path)
    if ours.keys() != theirs.keys():
        return Difference(path, f"parts {list(ours)}, compiled {list(theirs)}")
    for name, each in ours.items():
        inner = within | {id(wanted)}
        if difference := _difference(each, theirs[name], f"{path}{name}", inner):
            return difference
    return None


_VALUES = (int, float, str, bool, type(None))


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return what a value holds, by the steps that lead there; None if it does not hold things by name or place."""
    attributes = {f".{name}": each for name, each in _attributes_of(value).items()}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": each for key, each in value.items()} | attributes
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, (list, tuple, collections.deque, ValuesView, ItemsView)):
        return {f"[{place}]": each for place, each in enumerate(value)} | attributes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f".{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
        return fields | attributes
    is_object = hasattr(value, "__dict__") or bool(attributes)
    return attributes if is_object and not callable(value) and not _gives(value) else None


def _gives(value: Any) -> bool:
    """Say whether a value hands out what it holds in ways of its own: sets and iterators do."""
    return isinstance(value, (collections.abc.Set, Iterator))


def _by_spelling(wanted: Any, found: Any, path: str) -> Difference | None:
    """Compare what is no container: by the text that stands for it, if there is one."""
    try:
        if getattr(wanted, "__closure__", None):
            raise NotExactError("what a function holds is part of no text")
        ours, theirs = exact(wanted), exact(found)
    except NotExactError:
        kind = type(wanted).__name__
        raise ServeError(
            f"{path} is or holds a {kind}, which cannot be compared with the program's: return tensors in tuples, "
            "lists, dicts or objects"
        ) from None
    if isinstance(wanted, collections.abc.Set) and any(isinstance(each, Tensor) for each in wanted):
        raise ServeError(
            f"{path} is a {type(wanted).__name__} of tensors, which have no order in it and cannot be compared with "
            "the program's: return a list"
        )
    return None if ours == theirs else Difference(path, f"{wanted!r}, compiled {found!r}")


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


def is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy's that holds numbers."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds under names of its own; nothing of functions, classes and modules."""
    if isinstance(value, (type, enum.Enum, types.FunctionType, types.ModuleType)):
        return {}
    slots = {
        name
        for base in type(value).__mro__
        for name, each in vars(base).items()
        if isinstance(each, types.MemberDescriptorType) and not name.startswith("__")
    }
    own = getattr(value, "__dict__", {})
    return {**own, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}
