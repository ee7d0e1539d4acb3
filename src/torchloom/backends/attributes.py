"""Reads attributes of user objects, whose `__getattr__` may raise anything."""

from __future__ import annotations

from typing import Any


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default if reading it raises anything.

    Args:
        value: any object, also one whose `__getattr__` fails.
        name: of the attribute.
        default: returned in its place.
    """
    try:
        return getattr(value, name, default)
    except Exception:  # noqa: BLE001  an object's own `__getattr__` raises anything
        return default
