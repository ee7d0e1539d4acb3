"""Gradients that are not finite (config key `non_finite`, error NonFiniteError)."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import FINE, Setup, exits, told
from faults.matrix.cases.making import GLOO, SHM, over

_TWO = (FINE, FINE)
_SAYS = (told("NonFiniteError", "rank 1", "layers."),) * 2


def _policy(setup: Setup, policy: str, **rest) -> Setup:
    return replace(setup, config={"non_finite": policy, **rest})


def _bad(what: str, ends, setups, value: str = "nan", **rest):
    arguments = {"value": value, **rest.pop("arguments", {})}
    return over("numbers", what, "has_a_bad_gradient", ends, setups, arguments=arguments, **rest)


CASES = [
    *_bad("NaN in fp32 is skipped", _TWO, [GLOO, replace(SHM, stage=2)], limit_s=30),
    *_bad("Inf in bf16 is skipped", _TWO, [replace(GLOO, stage=1, config={"bf16": {"enabled": True}})],
          "inf", limit_s=30),
    *_bad("NaN raises", _SAYS, [_policy(GLOO, "raise"), _policy(SHM, "raise")]),
    *_bad("NaN stops the run", (exits(0),) * 2, [_policy(GLOO, "stop")]),
    *_bad("too many NaN in a row", (told("NonFiniteError"),) * 2,
          [_policy(GLOO, "skip", max_consecutive_skips=2)], arguments={"always": True}),
]  # fmt: skip
