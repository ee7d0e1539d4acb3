"""A compiler or a pass that fails on one rank: all fall back or all stop, never a mixture."""

from __future__ import annotations

from typing import Any

from faults.matrix.programs.rank import Rank


def compiler_fails(rank: Rank) -> None:
    def broken(gm: Any, example_inputs: Any) -> Any:
        rank.mark()
        if rank.rank in rank.arguments["ranks"]:
            raise RuntimeError("no such kernel")
        return gm

    engine = rank.start(broken)
    _train(rank, engine)


def pass_fails(rank: Rank) -> None:
    def look(graph: Any) -> None:
        rank.mark()
        if rank.rank in rank.arguments["ranks"]:
            raise RuntimeError("no such node")

    engine = rank.start(passes=["zero3", look])
    _train(rank, engine)


def _train(rank: Rank, engine: Any) -> None:
    for index in range(30):  # long enough for a word from rank to rank
        rank.step(index)
    rank.finish(f",{len(engine.compile_report().fallbacks)}-graphs-run-eagerly")
