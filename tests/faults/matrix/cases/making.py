"""How most cases are made: a program over several setups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from faults.matrix.case import Case, Ends, Setup

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
    **rest: Any,
) -> list[Case]:
    """Return a case for each setup."""
    return [
        Case(
            name=f"{family}.{what} [{setup.text()}]",
            program=program,
            ends=ends,
            setup=setup,
            **rest,
        )
        for setup in setups
    ]
