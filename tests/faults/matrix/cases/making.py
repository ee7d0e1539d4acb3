"""How most cases are made: a program over several setups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from faults.matrix.case import LIMIT_S, Case, Ends, Setup

COMPILED_S = 20.0
"""From the fault to the end where ranks may compile in between."""
GLOO = Setup()
SHM = Setup(shared=True)
GLOO_COMPILED = Setup(backend="aot_eager")
SHM_COMPILED = Setup(backend="aot_eager", shared=True)


def over(
    family: str,
    what: str,
    program: str,
    ends: tuple[Ends, ...],
    setups: Iterable[Setup],
    limit_s: float | None = None,
    **rest: Any,
) -> list[Case]:
    """Return a case for each setup; compiled ones may compile anew after the fault."""
    return [
        Case(
            name=f"{family}.{what} [{setup.text()}]",
            program=program,
            ends=ends,
            setup=setup,
            limit_s=_limit(setup) if limit_s is None else limit_s,
            **rest,
        )
        for setup in setups
    ]


def _limit(setup: Setup) -> float:
    return COMPILED_S if setup.backend else LIMIT_S
