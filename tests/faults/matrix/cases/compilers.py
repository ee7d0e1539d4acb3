"""A compiler or a pass that fails, on one rank or on all: all fall back or all stop."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import FINE, raised, told
from faults.matrix.cases.making import GLOO, GLOO_COMPILED, SHM, SHM_COMPILED, over

_STOP = (told("rank 1 has failed with", "no such"), raised("no such kernel"))
_STRICT = {"compile": {"strict": True}}

CASES = [
    *over("compile", "compiler fails on one rank", "compiler_fails", _STOP, [GLOO, SHM],
          arguments={"ranks": [1]}, may_end=True, limit_s=20),
    *over("compile", "compiler fails on all ranks", "compiler_fails", (raised("no such kernel"),) * 2,
          [GLOO], arguments={"ranks": [0, 1]}, may_end=True, limit_s=20),
    *over("compile", "pass fails on one rank", "pass_fails", (told("rank"),) * 2,
          [GLOO_COMPILED, SHM_COMPILED], arguments={"ranks": [1]}, may_end=True, limit_s=20),
    *over("compile", "pass fails on all ranks", "pass_fails", (FINE, FINE), [GLOO_COMPILED],
          arguments={"ranks": [0, 1]}, limit_s=30),
    *over("compile", "strict, pass fails on one rank", "pass_fails",
          (told("rank 1"), told("look", "no such node")), [replace(GLOO_COMPILED, config=_STRICT)],
          arguments={"ranks": [1]}, limit_s=20),
]  # fmt: skip
