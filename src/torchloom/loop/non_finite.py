"""Find the gradient that is not finite and its rank, once the global norm is not finite.

    every rank    key = (place of its first bad parameter, its rank, nan or inf)
    all ranks     the least key, by one collective of two numbers

Gradients are averaged already, so one rank's NaN is often on all ranks; the rank whose own loss is not
finite is the likely source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom.loop.norms import device_of, first_of_ranks
from torchloom.runtime import Communicator

_NONE = torch.iinfo(torch.int64).max
_KINDS = ("nan", "inf")


class Source(NamedTuple):
    """Where a value that is not finite was found."""

    place: int
    """Of the parameter in the model's order."""
    rank: int
    """Global."""
    kind: str
    """"nan" or "inf"."""


@dataclass(frozen=True)
class NonFinite:
    """What all ranks know of gradients that are not finite."""

    param: str
    """The first parameter, in the model's order."""
    rank: int
    kind: str
    loss: Source | None
    """The first rank whose own loss was not finite."""

    def __str__(self) -> str:
        """Return the finding in words."""
        text = f"gradients are not finite, first that of {self.param!r} ({self.kind}, rank {self.rank})"
        if self.loss is not None:
            text += f"; the loss of rank {self.loss.rank} was {self.loss.kind}"
        return text


def find_non_finite(
    names: Sequence[str],
    grads: Sequence[Tensor | None],
    losses: Collection[Tensor],
    comm: Communicator,
) -> NonFinite | None:
    """Return the first gradient that is not finite on any rank. All ranks must call.

    Args:
        names: the trainable parameters in the model's order, the same on all ranks.
        grads: what this rank would step each with, or None.
        losses: this rank's own since the last step.
        comm: the communicator of the gradients.

    Returns:
        The same on every rank; None where all gradients are finite and only their norm overflows.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    present = [grad for grad in grads if grad is not None]
    told = list(losses) or [torch.zeros(())]
    keys = torch.tensor(
        [_first_key(grads, rank, num_ranks), min(_first_key([x], rank, num_ranks) for x in told)],
        device=device_of(present, comm),
    )
    first, loss = (_source(key, num_ranks) for key in first_of_ranks(keys, comm).tolist())
    if first is None:
        return None
    return NonFinite(names[first.place], first.rank, first.kind, loss)


def _first_key(tensors: Sequence[Tensor | None], rank: int, num_ranks: int) -> int:
    for place, tensor in enumerate(tensors):
        if tensor is None or bool(torch.isfinite(tensor).all()):
            continue
        kind = 0 if bool(torch.isnan(tensor).any()) else 1
        return (place * num_ranks + rank) * len(_KINDS) + kind
    return _NONE


def _source(key: int, num_ranks: int) -> Source | None:
    if key == _NONE:
        return None
    place_and_rank, kind = divmod(key, len(_KINDS))
    return Source(*divmod(place_and_rank, num_ranks), _KINDS[kind])
