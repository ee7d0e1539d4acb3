"""Chooses what carries the collectives of a group, by its backend and what the user asked for.

A new transport is a class that meets `runtime.base.Collectives`, in a file of its own, and a branch of `connect`.
One whose messages carry no names has a channel without tags: ranks compare checksums once a step instead.

    gloo      direct messages between all pairs of ranks
    c10d      the tensor collectives of any other backend of torch.distributed (NCCL)
    shm       memory that the ranks of one host share

`summing` is what those do alike that sum by themselves.
"""

from __future__ import annotations

import torch.distributed as dist

from torchloom.log import get_logger
from torchloom.runtime.base import Collectives, GroupRef, UnavailableError, carried_by_gloo
from torchloom.runtime.channel import Channel
from torchloom.runtime.lines import end_waits_with_verdict
from torchloom.runtime.transports import shm
from torchloom.runtime.transports.c10d import C10dCollectives
from torchloom.runtime.transports.gloo import GlooCollectives

logger = get_logger(__name__)


def connect(group: GroupRef, name: str, *, symmetric_memory: bool) -> Collectives:
    """Return the collectives of a group; all its ranks must call, in one order.

    Args:
        group: the ranks.
        name: of what they do together, equal on all of them; see `Channel`.
        symmetric_memory: whether the user asked for memory that ranks share.

    Raises:
        PeerLostError: some rank did not take part.
    """
    backend, ranks = str(dist.get_backend(group())), tuple(dist.get_process_group_ranks(group()))

    def channel(*, has_tags: bool = True) -> Channel:
        return Channel(f"{name} {'-'.join(map(str, ranks))}", ranks, has_tags)

    if symmetric_memory and group.size > 1:
        try:
            return shm.connect(group, channel())
        except UnavailableError as error:
            if dist.get_rank() == 0:
                logger.warning(
                    "compile.symmetric_memory: %s; %d ranks communicate over %s instead (slower, same results)",
                    str(error),  # a record that is kept would keep the memory through the error
                    group.size,
                    backend,
                )
    end_waits_with_verdict(group)
    if carried_by_gloo(group()):
        return GlooCollectives(group, channel())
    return C10dCollectives(group, channel(has_tags=False))
