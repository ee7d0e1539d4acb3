"""Right programs: they must go on, and come to the right weights."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import FINE
from faults.matrix.cases.making import GLOO, GLOO_COMPILED, SHM, SHM_COMPILED, over

_TWO = (FINE, FINE)

CASES = [
    *over("right", "undisturbed", "undisturbed", _TWO, [GLOO, SHM], limit_s=30),
    *over("right", "lengths differ", "lengths_differ", _TWO, [GLOO_COMPILED, SHM_COMPILED], limit_s=60),
    *over("right", "one rank recompiles", "one_rank_recompiles", _TWO, [GLOO_COMPILED, SHM_COMPILED],
          limit_s=60),
    *over("right", "one rank sleeps 5 s", "one_rank_sleeps", _TWO, [GLOO], limit_s=30,
          trains_like="right.undisturbed [gloo eager stage3]"),
    *over("right", "one rank sleeps 5 s", "one_rank_sleeps", _TWO, [SHM], limit_s=30,
          trains_like="right.undisturbed [shm eager stage3]"),
    *over("right", "one rank compiles 6 s longer", "one_rank_compiles_long", _TWO, [GLOO, SHM],
          arguments={"seconds": 6}, limit_s=60),
    *over("right", "one rank compiles longer than timeouts.step_s", "one_rank_compiles_long", _TWO,
          [replace(GLOO, config={"timeouts": {"step_s": 3.0}})], arguments={"seconds": 6}, limit_s=60),
]  # fmt: skip
