"""A compiler or a pass that fails, on one rank or on all: all fall back or all stop."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import FINE, told
from faults.matrix.cases.making import GLOO, SHM, over

_STOP = (told("rank"),) * 2
_STRICT = {"compile": {"strict": True}}

CASES = [
    *over("compile", "compiler fails on one rank", "compiler_fails", _STOP, [GLOO, SHM],
          arguments={"ranks": [1]}, may_end=True, limit_s=20),
    *over("compile", "compiler fails on all ranks", "compiler_fails", _STOP, [GLOO],
          arguments={"ranks": [0, 1]}, may_end=True, limit_s=20),
    *over("compile", "pass fails on one rank", "pass_fails", _STOP, [GLOO, SHM],
          arguments={"ranks": [1]}, may_end=True, limit_s=20),
    *over("compile", "pass fails on all ranks", "pass_fails", (FINE, FINE), [GLOO],
          arguments={"ranks": [0, 1]}, limit_s=30),
    *over("compile", "strict, pass fails on one rank", "pass_fails",
          (told("rank 1"), told("look", "no such node")), [replace(GLOO, config=_STRICT)],
          arguments={"ranks": [1]}, limit_s=20),
]  # fmt: skip
