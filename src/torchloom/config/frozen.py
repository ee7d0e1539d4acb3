"""A mapping that cannot change, for settings that hold free-form keys.

`freeze` turns nested dicts and lists into frozen mappings and tuples; `thaw` turns them back into
plain dicts and lists that `json.dumps` accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class FrozenMap(Mapping[str, object]):
    """A read-only mapping that pickles, hashes by content where it can, and unpacks with `**`.

    Example:
        >>> dict(**FrozenMap({"lr": 0.1}))
        {'lr': 0.1}
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        self._items = {} if items is None else dict(items)

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"


def freeze(value: object) -> object:
    """Return `value` with each mapping inside it frozen and each list a tuple."""
    if isinstance(value, Mapping):
        return FrozenMap({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def frozen_map(value: Mapping[str, object]) -> FrozenMap:
    """Return a deeply frozen copy of one mapping."""
    return FrozenMap({key: freeze(item) for key, item in value.items()})


def thawed_map(value: Mapping[str, object]) -> dict[str, Any]:
    """Return a plain, deeply thawed dict of one mapping."""
    return {key: thaw(item) for key, item in value.items()}


def thaw(value: object) -> object:
    """Return `value` with each mapping a plain dict and each tuple a list.

    Example:
        >>> thaw(freeze({"betas": [0.9, 0.99]}))
        {'betas': [0.9, 0.99]}
    """
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value
