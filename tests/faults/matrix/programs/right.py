"""Right programs, in which ranks are slow or compile at different times."""

from __future__ import annotations

import time
from typing import Any

from faults.matrix.programs.rank import Rank

_LENGTHS = {0: (2, 2, 4, 2, 7, 3), 1: (2, 3, 2, 2, 2, 2)}


def undisturbed(rank: Rank) -> None:
    rank.start()
    rank.mark()
    for index in range(6):
        rank.step(index)
    rank.finish()


def lengths_differ(rank: Rank) -> None:
    """Ranks recompile at different steps."""
    rank.start()
    rank.mark()
    for index, rows in enumerate(_LENGTHS[rank.rank % 2]):
        rank.step(index, rows=rows)
    rank.finish()


def one_rank_recompiles(rank: Rank) -> None:
    rank.start(compile_kwargs={"dynamic": False})
    rank.mark()
    for index in range(6):
        rank.step(index, rows=2 + index // 2 if rank.rank else 2)
    rank.finish()


def one_rank_sleeps(rank: Rank) -> None:
    rank.start()
    for index in range(6):
        if index == 3 and rank.rank == 1:
            rank.mark()
            time.sleep(5)
        rank.step(index)
    rank.finish()


def one_rank_compiles_long(rank: Rank) -> None:
    """A compiler that takes longer on rank 1 than a step may take."""
    slept = []

    def slow(gm: Any, example_inputs: Any) -> Any:
        if rank.rank == 1 and not slept:
            slept.append(True)
            rank.mark()
            time.sleep(rank.arguments["seconds"])
        return gm

    rank.start(slow)
    for index in range(6):
        rank.step(index)
    rank.finish()
