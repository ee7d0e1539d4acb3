"""Change the tensors in what modules take and return, and find the loss: nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

Change = Callable[[Tensor], Tensor | None]
"""Returns what becomes of a tensor; None: it stays."""


def map_tensors(value: Any, change: Change) -> Any:
    """Return a value with other tensors; containers keep their class, and one without a change is returned itself.

    Example:
        >>> import torch
        >>> map_tensors({"x": torch.ones(2), "n": [3]}, torch.neg)
        {'x': tensor([-1., -1.]), 'n': [3]}
    """
    return _mapped(value, change)[0]


def loss_in(result: Any) -> Tensor | None:
    """Return the loss that a model returned, by itself or as the field `loss` of a result; None for none of one number."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _mapped(value: Any, change: Change) -> tuple[Any, bool]:
    """Return what becomes of a value, and whether it is another: Dynamo cannot compare containers by identity."""
    if isinstance(value, Tensor):
        made = change(value)
        return (value, False) if made is None else (made, True)
    is_changed = False
    if isinstance(value, Mapping):
        changed = _changed(value.items(), change)
        if isinstance(value, MutableMapping):
            is_changed = bool(changed)
            value = _with_items(value, changed)
    if isinstance(value, (list, tuple)):
        changed = _changed(enumerate(value), change)
        if not changed:
            return value, is_changed
        items = [changed.get(index, item) for index, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else type(value)(items), True  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        changed = _changed(((n, getattr(value, n)) for n in names), change)
        return _with_fields(value, changed), is_changed or bool(changed)
    return value, is_changed


def _changed(items: Iterable[tuple[Any, Any]], change: Change) -> dict[Any, Any]:
    """Return what becomes of those items that are changed, or hold something that is."""
    mapped = ((key, *_mapped(item, change)) for key, item in items)
    return {key: new for key, new, is_changed in mapped if is_changed}


def _with_items(value: MutableMapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with some items replaced: of its class, with its attributes."""
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}  # Dynamo traces this, and breaks at `copy.copy`
    if dataclasses.is_dataclass(value):
        # Outputs of transformers: of a copy, Dynamo (torch 2.13) hands out an object without the other items.
        return type(value)(**{**value, **changed})
    made = copy.copy(value)
    for key, item in changed.items():
        made[key] = item
    return made


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with some fields replaced, also of a frozen one."""
    if not changed:
        return value
    made = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)
    return made
