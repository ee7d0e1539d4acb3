"""Texts of ranks through the key-value store of their process group: 0.3-2 ms for two ranks.

Each exchange has a prefix that nothing else uses, and each call a number below it, so texts of
different calls never meet.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch.distributed as dist

from torchloom._torch.distributed import hushed_store
from torchloom.exchange.base import late, named, unnamed

_POLL_S, _MOST_POLL_S = 0.0005, 0.05
"""How often a rank looks for what others say; rarer while it waits."""


class RankWatch(Protocol):
    """Notices, while a rank waits for the others, that one of them has ended."""

    def waits(self, what: str) -> AbstractContextManager[None]:
        """Say for the length of a `with` block what this rank waits for; explain a lost store."""
        ...

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Raise if the run is known not to go on, or one of the missing ranks not to come."""
        ...


@final
class _Unwatched:
    def waits(self, what: str) -> AbstractContextManager[None]:
        del what
        return nullcontext()

    def look(self, missing: Callable[[], list[int]]) -> None:
        pass


@final
@dataclass(frozen=True, kw_only=True)
class StoreExchange:
    """Ranks that reach one key-value store; see `Exchange`.

    A rank polls the store instead of waiting in it: a wait inside of the store would let no signal
    through until it ends.
    """

    rank: int
    world_size: int
    prefix: str
    """Of the keys: equal on all ranks, and used for nothing else."""
    store: Callable[[], Any]
    """Returns the store; asked at each call, as a process group may be destroyed and made again."""
    timeout_s: Callable[[], float]
    """Returns how long ranks may lag behind, in seconds."""
    late: Callable[[str, list[int], float], Exception] = late
    """Makes the error for ranks that did not come: (what, missing ranks, seconds waited)."""
    watch: RankWatch = field(default_factory=_Unwatched)
    _ordinal: itertools.count[int] = field(default_factory=itertools.count, init=False)

    def texts(self, what: str, text: str) -> list[str]:
        """Tell all ranks a text, and return theirs; see `Exchange.texts`."""
        with self._call(what) as store:
            store.set(str(self.rank), named(what, text))
            told = self._read(store, what, range(self.world_size))
        return list(unnamed(what, told).values())

    def tell(self, what: str, text: str) -> None:
        """Tell all ranks a text without waiting; see `Exchange.tell`."""
        with self._call(what) as store:
            store.set(str(self.rank), named(what, text))

    def hear(self, what: str, rank: int) -> str:
        """Return what another rank says; see `Exchange.hear`."""
        with self._call(what) as store:
            told = self._read(store, what, range(rank, rank + 1))
        return unnamed(what, told)[rank]

    @contextmanager
    def _call(self, what: str) -> Iterator[Any]:
        """Give one call its part of the store."""
        store = dist.PrefixStore(f"{self.prefix}/{next(self._ordinal)}", self.store())
        with self.watch.waits(what), hushed_store():
            yield store

    def _read(self, store: Any, what: str, ranks: range) -> dict[int, str]:
        """Return what ranks have told, once all of them have."""
        keys = [str(rank) for rank in ranks]
        self._await(store, what, keys)
        if store.has_extended_api():  # one request instead of one for each rank
            values = store.multi_get(keys)
        else:
            values = [store.get(key) for key in keys]
        return {rank: bytes(value).decode() for rank, value in zip(ranks, values, strict=True)}

    def _await(self, store: Any, what: str, keys: list[str]) -> None:
        timeout_s = self.timeout_s()
        pause_s, deadline = _POLL_S, time.monotonic() + timeout_s

        def missing() -> list[int]:
            return [int(key) for key in keys if not store.check([key])]

        while not store.check(keys):
            self.watch.look(missing)
            if time.monotonic() > deadline:
                raise self.late(what, missing(), timeout_s)
            time.sleep(pause_s)
            pause_s = min(_MOST_POLL_S, pause_s * 1.5)
