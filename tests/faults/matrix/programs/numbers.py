"""Gradients that are not finite on one rank (config key `non_finite`)."""

from __future__ import annotations

from faults.matrix.programs.rank import Rank


def has_a_bad_gradient(rank: Rank) -> None:
    engine = rank.start()
    for index in range(6):
        loss = engine(rank.batch(index))
        is_bad = index == 3 or (rank.arguments.get("always", False) and index > 3)
        if is_bad and rank.rank == 1:
            rank.mark()
            loss = loss * float(rank.arguments["value"])
        engine.backward(loss)
        engine.step()
        if getattr(engine, "should_stop", False):
            print("stops in order", flush=True)
            break
    rank.finish()
