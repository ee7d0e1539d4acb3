"""Gathered weights that live as long as one eager forward pass.

A tied parameter is gathered once per forward, not once per use. The root module's forward opens
and closes the memo; outside of a forward pass nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MEMOS: dict[str, Memo] = {}


class Memo:
    """Weights gathered in the current forward pass over one communicator."""

    def __init__(self) -> None:
        self._depth = 0
        self._kept: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        """Shards and their weights. By shard: a copy of the model has the same names."""

    @staticmethod
    def of(handle: str) -> Memo:
        """Return the memo of a communicator."""
        return _MEMOS.setdefault(handle, Memo())

    def open(self) -> None:
        """Enter a forward pass; passes may nest."""
        self._depth += 1

    def close(self) -> None:
        """Leave a forward pass and forget what was gathered in it."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._kept.clear()

    def get(self, shard: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """Return the weight of a shard that was gathered earlier in this forward pass, or gather it now."""
        if self._depth == 0:
            return gather()
        key = (id(shard), torch.is_grad_enabled())
        if key not in self._kept:
            self._kept[key] = (shard, gather())
        return self._kept[key][1]
