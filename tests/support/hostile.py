"""A value whose every question raises."""

from __future__ import annotations


class Hostile:
    """Everything that a careless printer asks of a value raises."""

    def __repr__(self):
        raise RuntimeError("repr was called")

    def __eq__(self, other):
        raise RuntimeError("== was called")

    def __getattr__(self, name):
        raise RuntimeError(f"{name} was read")

    __hash__ = None


HOSTILE = Hostile()
