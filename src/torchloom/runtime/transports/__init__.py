"""Chooses what carries the collectives of a group: the first row of a table that is for it and can be had.

A new transport is a class that meets `runtime.base.Collectives`, in a file of its own, and one row here.

    gloo      direct messages between all pairs of ranks
    c10d      the tensor collectives of any other backend of torch.distributed (NCCL)
    shm       memory that the ranks of one host share

`summing` is what those do alike that sum by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from torchloom.log import get_logger
from torchloom.runtime.base import Collectives, GroupRef, UnavailableError
from torchloom.runtime.channel import Channel
from torchloom.runtime.transports import c10d, gloo, shm

logger = get_logger(__name__)


@dataclass(frozen=True)
class Asked:
    """What decides on a transport; equal on all ranks of the group."""

    backend: str
    """Of the process group, as torch names it."""
    num_ranks: int
    symmetric_memory: bool
    """Whether the user asked for memory that ranks share."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One way for the tensors of a group."""

    name: str
    is_for: Callable[[Asked], bool]
    make: Callable[[GroupRef, Channel], Collectives]
    """Returns the collectives; raises `UnavailableError` on all ranks alike where they cannot be had."""
    has_tags: bool = True
    """Whether messages carry the name of their collective; else ranks compare checksums once a step."""
    option: str = ""
    """The config key that asks for it; where it cannot be had, the log names the key and the reason."""


TRANSPORTS = (
    Transport(
        name="shared memory",
        is_for=lambda asked: asked.symmetric_memory and asked.num_ranks > 1,
        make=shm.connect,
        option="compile.symmetric_memory",
    ),
    Transport(name="gloo", is_for=lambda asked: "gloo" in asked.backend, make=gloo.connect),
    Transport(name="c10d", is_for=lambda asked: True, make=c10d.C10dCollectives, has_tags=False),
)
"""In order of preference; the last one is for every group."""


def connect(group: GroupRef, name: str, *, symmetric_memory: bool) -> Collectives:
    """Return the collectives of a group; all its ranks must call, in one order.

    Args:
        group: the ranks.
        name: of what they do together, equal on all of them; see `Channel`.
        symmetric_memory: whether the user asked for memory that ranks share.

    Raises:
        PeerLostError: some rank did not take part.
    """
    asked = Asked(str(dist.get_backend(group())), group.size, symmetric_memory)
    *preferred, last = (row for row in TRANSPORTS if row.is_for(asked))
    for row in preferred:
        made = _made(row, group, name, asked)
        if made is not None:
            return made
    return last.make(group, _channel(group, name, last.has_tags))


def _made(row: Transport, group: GroupRef, name: str, asked: Asked) -> Collectives | None:
    """Return the collectives of a row, or None where they cannot be had."""
    try:
        return row.make(group, _channel(group, name, row.has_tags))
    except UnavailableError as error:
        _say_why(row, asked, str(error))
        return None


def _channel(group: GroupRef, name: str, has_tags: bool) -> Channel:
    ranks = tuple(dist.get_process_group_ranks(group()))
    return Channel(f"{name} {'-'.join(map(str, ranks))}", ranks, has_tags)


def _say_why(row: Transport, asked: Asked, reason: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(
            "%s: %s; %d ranks communicate over %s instead (slower, same results)",
            row.option or row.name,
            reason,
            asked.num_ranks,
            asked.backend,
        )
