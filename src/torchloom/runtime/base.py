"""What a collective implementation must do: one class per transport.

All methods only *begin* communication; they return a `Pending` whose `finish()` blocks until every
result holds its value. Results are allocated by the caller. Arguments are contiguous. All ranks
call the same methods in the same order with equally sized tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Pending:
    """Communication on its way. Holds references to everything that is on the wire."""

    finish: Callable[[], None]
    """Block until the results have arrived."""


class Collectives(Protocol):
    """Moves tensors between the ranks of one group."""

    @property
    def overlaps_compute(self) -> bool:
        """Whether transfers run beside compute, instead of taking the same cores."""
        ...

    def all_gather(self, shards: Sequence[Tensor], fulls: Sequence[Tensor]) -> Pending:
        """Begin to fill `fulls[i]` (world size times `shards[i]`) with all ranks' `shards[i]`."""
        ...

    def reduce_scatter(
        self, fulls: Sequence[Tensor], shards: Sequence[Tensor], scale: float
    ) -> Pending:
        """Begin to fill `shards[i]` with this rank's slice of the sum of all `fulls[i]`.

        A full tensor may hold fewer elements than world size times its shard; the rest of the
        last shards is then padding and becomes zero. The sum is multiplied by `scale` and cast
        to the shard's dtype.
        """
        ...

    def all_reduce(self, tensors: Sequence[Tensor], scale: float) -> Pending:
        """Begin to replace each tensor by `scale` times its sum over the ranks, in place."""
        ...
