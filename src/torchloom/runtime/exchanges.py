"""The exchanges of this process: between all ranks, with ended ranks noticed, and within one group."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch.distributed as dist

from torchloom._torch.distributed import default_store, group_store, group_timeout
from torchloom.errors import PeerLostError, first_line
from torchloom.exchange import Agreement, Alone, Exchange, StoreExchange
from torchloom.position import POSITION, Verdict, Wait
from torchloom.runtime.base import GroupRef
from torchloom.runtime.channel import Channel, label
from torchloom.runtime.lines import explained, longest_s, open_lines

_SERIALS = itertools.count()


def new_agreement(rank: int, world_size: int, timeout_s: float | None = None) -> Agreement:
    """Return an agreement between all ranks; they must make theirs in the same order.

    A rank that waits in it is seen by the others as waiting for what it compares (`runtime.lines`), so
    a rank that has come to something else, or has ended, is an error within seconds.

    Args:
        rank: of this process.
        world_size: of the default process group.
        timeout_s: how long a rank may lag behind, in seconds; None leaves it to `timeouts.agree_s`.
    """
    serial = next(_SERIALS)
    if world_size == 1:
        return Agreement(Alone())
    channel = Channel(f"agreement {serial}", tuple(range(world_size)), polls_verdict=True)
    open_lines()
    return Agreement(
        StoreExchange(
            rank=rank,
            world_size=world_size,
            prefix=f"torchloom/agree/{serial}",
            store=default_store,
            timeout_s=longest_s if timeout_s is None else lambda: timeout_s,
            watch=_OverLines(channel),
        )
    )


def group_exchange(group: GroupRef) -> Exchange:
    """Return an exchange between the ranks of a group, for setting up what they share.

    Raises:
        ShardError: the group has been destroyed.
    """
    store, timeout_s = group_store(group()), group_timeout(group()).total_seconds()
    return StoreExchange(
        rank=group.rank,
        world_size=group.size,
        prefix=f"torchloom/shm/{_serial(group())}",
        store=lambda: store,
        timeout_s=lambda: timeout_s,
        late=_did_not_take_part,
    )


@final
class _OverLines:
    """Tells the other ranks what this one waits for, and raises what they find out."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Say what this rank waits for; explain a store that is lost."""
        entry = self._channel.begin(label(f"agreement on {what}"))
        POSITION.waiting = Wait(entry, time.monotonic())
        try:
            yield
        except dist.DistError as error:
            raise explained(entry, _store_lost(what, error)) from None
        finally:
            POSITION.waiting = None

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Raise the verdict on the run, if there is one."""
        del missing
        if POSITION.verdict is not None:
            raise POSITION.verdict.error()


def _store_lost(what: str, error: Exception) -> Verdict:
    return Verdict(
        "lost",
        f"the key-value store of the run cannot be reached ({first_line(error)}) while "
        f"ranks agree on {what}: the process that hosts it has ended, or its host cannot be "
        "reached; look at the output of rank 0 and of the launcher",
    )


def _did_not_take_part(what: str, missing: list[int], timeout_s: float) -> Exception:
    return PeerLostError(
        f"ranks {missing} did not take part in setting up shared memory ({what!r}) within "
        f"{timeout_s:.0f} s: look at their output"
    )


_GROUP_SERIALS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


def _serial(group: dist.ProcessGroup) -> int:
    """Count the exchanges of a group: all ranks make them in the same order."""
    return next(_GROUP_SERIALS.setdefault(group, itertools.count()))
