"""Finding out whether the ranks of a group share memory, and setting it up.

All ranks take part and come to the same answer: what they tell each other goes through the group's
key-value store, and the answer depends on nothing else.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from torchloom._torch.distributed import group_store, group_timeout
from torchloom._torch.exchange import texts_of
from torchloom.errors import PeerLostError
from torchloom.runtime.base import GroupRef
from torchloom.runtime.channel import Channel
from torchloom.runtime.shm.arena import Exchange, UnavailableError, make_arena
from torchloom.runtime.shm.collectives import SharedMemoryCollectives
from torchloom.runtime.shm.link import Link
from torchloom.runtime.shm.peers import Peer

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
    exchange = make_exchange(group)
    peers, reason = _meet(group, exchange)
    if reason:
        raise UnavailableError(reason)
    size = group.size
    control = Link.control_bytes(size, NUM_SLOTS)
    arena = make_arena(peers, group.rank, exchange, control + size * NUM_SLOTS * slot_bytes)
    link = Link(arena, peers, group.rank, channel, NUM_SLOTS)
    if group.rank == 0:
        link.init()
    exchange("ready", "")
    rows = arena.tensor(control, size * NUM_SLOTS * slot_bytes, torch.uint8)
    slots = [list(row) for row in rows.view(size, NUM_SLOTS, slot_bytes)]
    made = SharedMemoryCollectives(group, link, slots)
    weakref.finalize(group(), _close, weakref.ref(made))
    return made


def make_exchange(group: GroupRef) -> Exchange:
    """Return a function by which all ranks of a group tell each other short texts."""
    store = group_store(group())
    timeout_s = group_timeout(group()).total_seconds()
    serial, ordinal = _serial(group()), itertools.count()

    def exchange(topic: str, text: str) -> list[str]:
        keys = f"torchloom/shm/{serial}/{next(ordinal)}/{topic}"
        mine = dist.PrefixStore(keys, store)
        mine.set(str(group.rank), text)
        texts, missing = texts_of(mine, range(group.size), timeout_s)
        if missing:
            raise PeerLostError(
                f"ranks {missing} did not take part in setting up shared memory ({topic!r}) within "
                f"{timeout_s:.0f} s: look at their output"
            )
        return list(texts.values())

    return exchange


def _meet(group: GroupRef, exchange: Exchange) -> tuple[list[Peer], str]:
    """Return the ranks' processes and why they cannot share memory, if so."""
    try:
        mine = Peer.me().to_text()
    except (OSError, AttributeError):
        mine = ""
    texts = exchange("peers", mine)
    if group.size > MAX_RANKS:
        return [], f"{group.size} ranks share their weights, at most {MAX_RANKS} can"
    without = [rank for rank, text in enumerate(texts) if not text]
    if without:
        return [], f"rank {without[0]} has no /proc (shared memory needs Linux)"
    peers = [Peer.from_text(text) for text in texts]
    num_hosts = len({peer.host for peer in peers})
    if num_hosts > 1:
        return [], f"the ranks run on {num_hosts} hosts or containers"
    return peers, ""


def _close(made: weakref.ref[SharedMemoryCollectives]) -> None:
    transport = made()
    if transport is not None:
        transport.close()


_SERIALS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


def _serial(group: dist.ProcessGroup) -> int:
    """Count the exchanges of a group: all ranks make them in the same order."""
    return next(_SERIALS.setdefault(group, itertools.count()))
