"""Asking an object of a program for an attribute: it may raise anything instead."""

from __future__ import annotations

from typing import Any


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default where the object does not give it, whatever it raises.

    Args:
        value: any object, also one whose `__getattr__` fails.
        name: of the attribute.
        default: returned in its place.
    """
    try:
        return getattr(value, name, default)
    except Exception:  # noqa: BLE001  an object's own `__getattr__` raises anything
        return default
