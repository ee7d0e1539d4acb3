"""Connects the processes of one host by memory that all of them map, or says why it cannot be had.

Then the process group's own messages carry the bytes, as they do everywhere else. All ranks take part and come to the
same answer, which depends on nothing but what they tell each other.
"""

from __future__ import annotations

import json
import weakref

import torch
import torch.distributed as dist

from torchloom.exchange import Exchange
from torchloom.runtime.base import GroupRef, UnavailableError, carried_by_gloo
from torchloom.runtime.channel import Channel
from torchloom.runtime.exchanges import group_exchange
from torchloom.runtime.transports.shm.arena import Peer, make_arena
from torchloom.runtime.transports.shm.collectives import SharedMemoryCollectives
from torchloom.runtime.transports.shm.link import Link

__all__ = ["SharedMemoryCollectives", "UnavailableError", "connect"]


MAX_RANKS = 8
"""Each rank signals each other one, and reads its memory: beyond this, a tree would be better."""
NUM_SLOTS = 4
"""Of each rank: how many messages it may be ahead of the others before it has to wait for them."""
SLOT_BYTES = 8 << 20
"""Bytes of one slot: what one of two ranks sends of a reduction of 16 MiB, the default bucket."""


def connect(
    group: GroupRef, channel: Channel, slot_bytes: int = SLOT_BYTES
) -> SharedMemoryCollectives:
    """Return collectives over shared memory; all ranks of the group must call, in one order.

    Args:
        group: ranks that may share a host.
        channel: names what they do together.
        slot_bytes: bytes of each slot of a rank.

    Raises:
        UnavailableError: on all ranks alike, with the reason.
        PeerLostError: some rank did not take part.
    """
    if not carried_by_gloo(group()):
        raise UnavailableError(
            f"the process group is {dist.get_backend(group())}, only ranks on CPUs with gloo can share memory"
        )
    exchange = group_exchange(group)
    peers = _meet(group, exchange)
    size = group.size
    control = Link.control_bytes(size, NUM_SLOTS)
    arena = make_arena(peers, group.rank, exchange, control + size * NUM_SLOTS * slot_bytes)
    link = Link(arena, peers, group.rank, channel, NUM_SLOTS)
    if group.rank == 0:
        link.init()
    exchange.texts("ready", "")
    rows = arena.tensor(control, size * NUM_SLOTS * slot_bytes, torch.uint8)
    slots = [list(row) for row in rows.view(size, NUM_SLOTS, slot_bytes)]
    made = SharedMemoryCollectives(group, link, slots)
    weakref.finalize(group(), _close, weakref.ref(made))
    return made


def _meet(group: GroupRef, exchange: Exchange) -> list[Peer]:
    """Return the ranks' processes.

    Raises:
        UnavailableError: they cannot share memory.
    """
    try:
        mine = json.dumps(Peer.me())
    except (OSError, AttributeError):
        mine = ""
    texts = exchange.texts("peers", mine)
    if group.size > MAX_RANKS:
        raise UnavailableError(f"{group.size} ranks share their weights, at most {MAX_RANKS} can")
    if "" in texts:
        raise UnavailableError(f"rank {texts.index('')} has no /proc (shared memory needs Linux)")
    peers = [Peer(*json.loads(text)) for text in texts]
    num_hosts = len({peer.host for peer in peers})
    if num_hosts > 1:
        raise UnavailableError(f"the ranks run on {num_hosts} hosts or containers")
    return peers


def _close(made: weakref.ref[SharedMemoryCollectives]) -> None:
    transport = made()
    if transport is not None:
        transport.close()
