"""Pieces of work that pass through a few shared slots per rank, in the same order on every rank.

    issue   wait until all have read what was in my slot, fill it, say so
    drain   wait until all have filled theirs, read them, say so

Beginning never blocks: what finds no free slot is issued later, at the latest when its result is
wanted, and what others have filled is read whenever this rank comes by. So a rank that is late for a
moment holds nobody up as long as the slots last. All ranks begin and finish in one order, so some
rank can always go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from torchloom.runtime.channel import NamedCollective
from torchloom.runtime.transports.shm.link import Link, Signal, mark_of


class Work(NamedTuple):
    """One slotful."""

    fill: Callable[[Tensor], None]
    """Writes this rank's contribution into its slot."""
    drain: Callable[[Sequence[Tensor]], None]
    """Reads the slots of all ranks, this one's included."""
    entry: NamedCollective
    """What this is a part of."""


class Ring:
    """The slots of all ranks, and what is on its way through them."""

    def __init__(self, link: Link, slots: Sequence[Sequence[Tensor]]) -> None:
        """Take slots that are free.

        Args:
            link: signals between the ranks.
            slots: by rank, its slots: flat tensors of bytes, as many and as large on all ranks.
        """
        self._link, self._slots, self._num_slots = link, slots, len(slots[0])
        self._waiting: deque[Work] = deque()
        self._issued: deque[Work] = deque()
        self._num_begun = self._num_issued = self._num_drained = 0
        # Ranks that have freed the slot that this rank fills next, and filled those it reads next.
        self._freed_by: set[int] = set()
        self._filled_by: set[int] = set()

    def begin(self, work: Sequence[Work]) -> int:
        """Queue work and do what can be done at once; returns a ticket for `finish`."""
        self._waiting.extend(work)
        self._num_begun += len(work)
        self._issue_ready()
        while self._issued and self._is_filled():
            self._drain()
            self._issue_ready()
        return self._num_begun

    def finish(self, ticket: int) -> None:
        """Complete all work up to a ticket of `begin`."""
        while self._num_drained < ticket:
            self._issue_ready()
            if not self._issued:
                self._issue(blocking=True)
            self._drain()

    def _issue_ready(self) -> None:
        while self._waiting and len(self._issued) < self._num_slots:
            if not self._issue(blocking=False):
                return

    def _issue(self, *, blocking: bool) -> bool:
        for peer in self._link.others:
            if peer in self._freed_by:
                continue
            if blocking:
                self._link.await_(Signal.FREE, peer, self._waiting[0].entry)
            elif not self._link.has(Signal.FREE, peer):
                return False
            self._freed_by.add(peer)
        self._freed_by.clear()
        work = self._waiting.popleft()
        turn = self._num_issued % self._num_slots
        work.fill(self._slots[self._link.rank][turn])
        self._link.mark(turn, mark_of(work.entry, self._num_issued))
        self._num_issued += 1
        self._issued.append(work)
        for peer in self._link.others:
            self._link.send(Signal.FULL, peer)
        return True

    def _is_filled(self) -> bool:
        """Say whether all ranks have filled the slots that are read next."""
        waiting = [peer for peer in self._link.others if peer not in self._filled_by]
        self._filled_by |= {peer for peer in waiting if self._link.has(Signal.FULL, peer)}
        return len(self._filled_by) == len(self._link.others)

    def _drain(self) -> None:
        work, turn = self._issued[0], self._num_drained % self._num_slots
        mark = mark_of(work.entry, self._num_drained)
        for peer in self._link.others:
            if peer not in self._filled_by:
                self._link.await_(Signal.FULL, peer, work.entry)
            self._link.check(turn, mark, peer, work.entry)
        self._filled_by.clear()
        work.drain([slots[turn] for slots in self._slots])
        self._issued.popleft()
        self._num_drained += 1
        for peer in self._link.others:
            self._link.send(Signal.FREE, peer)
