"""Two hosts whose network is cut: both end by themselves."""

from __future__ import annotations

from faults.matrix.case import Case, told

_LIMIT_S = 20.0


def _cut(what: str, action: str, program: str) -> Case:
    return Case(name=f"network.{what}", program=program, action=action, limit_s=_LIMIT_S,
                ends=(told("rank 1"), told("rank 0")), needs_network=True)  # fmt: skip


CASES = [
    _cut("cut at rank 0 while training", "cut at rank 0", "trains_on"),
    _cut("cut at rank 1 while training", "cut at rank 1", "trains_on"),
    _cut("packets lost while training", "lose", "trains_on"),
    _cut("cut while rank 1 compiles", "cut at rank 1", "compiles_on"),
    _cut("packets lost while rank 1 compiles", "lose", "compiles_on"),
]
