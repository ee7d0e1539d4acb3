"""Runs several ranks as threads of one process, which exchange texts as ranks of a process group do.

    World(4).run(lambda exchange: shared_table(table_of(exchange.rank), "max", exchange=exchange))

Each rank is a thread; 512 of them take about 0.7 s for one call. Nothing depends on time: a rank that
waits for one that has ended gets its error at once, and one that waits for one that works waits as long
as that takes.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, final

from torchloom.exchange import late, named, unnamed

_T = TypeVar("_T")


@final
class SimulatedWorld:
    """A number of ranks that exist as threads of this process.

    Args:
        world_size: how many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._told: dict[int, dict[int, str]] = defaultdict(dict)
        """Texts as they travel, by rank, of each call by its number."""
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def run(self, fn: Callable[[_Rank], _T]) -> list[_T]:
        """Call `fn(exchange)` once for each rank, at the same time; return the results by rank.

        What the first rank that fails raises is raised here, once all have ended. A world runs once.
        """
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._live,
                args=(rank, fn, results, errors),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.world_size)]

    def say(self, rank: int, number: int, text: str) -> None:
        """Note what a rank tells in one call.

        Args:
            rank: who tells it.
            number: of the call.
            text: as it travels, with its name.
        """
        with self._changed:
            self._told[number][rank] = text
            self._changed.notify_all()

    def wait_for(self, what: str, number: int) -> list[str]:
        """Return what ranks tell in one call, by rank, once all of them have.

        Args:
            what: what they tell, for the error.
            number: of the call.

        Raises:
            AgreementError: a rank has ended without it.
        """
        wanted = set(range(self.world_size))
        with self._changed:
            told = self._told[number]
            self._changed.wait_for(lambda: wanted <= told.keys() | self._ended)
            missing = sorted(wanted - told.keys())
            if missing:
                raise late(what, missing, 0.0)
            return [told[rank] for rank in sorted(wanted)]

    def _live(
        self,
        rank: int,
        fn: Callable[[_Rank], Any],
        results: dict[int, Any],
        errors: list[BaseException],
    ) -> None:
        try:
            results[rank] = fn(_Rank(self, rank))
        except BaseException as error:  # noqa: BLE001  `run` raises it in the caller's thread
            errors.append(error)
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


@final
class _Rank:
    """The exchange as one rank of a world sees it; see `Exchange`."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self.rank, self.world_size = rank, world.world_size
        self._world = world
        self._numbers = itertools.count()

    def texts(self, what: str, text: str) -> list[str]:
        """Tell all ranks a text, and return theirs; see `Exchange.texts`."""
        number = next(self._numbers)
        self._world.say(self.rank, number, named(what, text))
        told = self._world.wait_for(what, number)
        return unnamed(what, told)
