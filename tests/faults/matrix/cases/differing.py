"""Ranks that run different programs: an error on all of them that says what each had come to."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import Setup, exits, told
from faults.matrix.cases.making import GLOO, GLOO_COMPILED, SHM, SHM_COMPILED, over

_BOTH = (told("rank 0", "rank 1", "in step"),) * 2
_ANY = (told("rank 0", "rank 1"),) * 2
_LAST = (told("rank 1 has ended its program"), exits(0))
_WIDE = Setup(width=512)
"""Messages large enough to travel by themselves."""


def _stage(stage: int, setup: Setup) -> Setup:
    return replace(setup, stage=stage)


def _alone(what: str, setups: list[Setup], last: bool = False):
    name = f"{what} on rank 0 alone{', as the last thing' if last else ''}"
    return over("differ", name, "calls_alone", _LAST if last else _BOTH, setups,
                arguments={"what": what, "last": last})  # fmt: skip


_HYBRID = {"zero_optimization": {"shard_size": 2}}

CASES = [
    *over("differ", "evaluates at another step", "evaluates_at_another_step", _BOTH,
          [GLOO, SHM, GLOO_COMPILED]),
    *over("differ", "evaluates on one rank alone", "evaluates_alone", _BOTH, [_WIDE, SHM_COMPILED]),
    *_alone("state_dict", [GLOO, SHM_COMPILED]),
    *_alone("state_dict", [GLOO, SHM], last=True),
    *_alone("gathered", [GLOO]),
    *_alone("gathered", [SHM], last=True),
    *_alone("save", [SHM]),
    *_alone("save", [GLOO], last=True),
    *over("differ", "load on rank 0 alone", "loads_alone", _ANY, [GLOO, SHM]),
    *over("differ", "clip_grad_norm_ on rank 0 alone", "own_loop_clips_alone", _BOTH, [GLOO]),
    *over("differ", "another order of layers", "another_order", _BOTH, [GLOO, SHM_COMPILED]),
    *over("differ", "another layer by data", "another_layer", _BOTH,
          [GLOO, SHM, GLOO_COMPILED, SHM_COMPILED, _stage(1, GLOO_COMPILED), _stage(2, SHM)]),
    # At stage 1 in eager mode a gradient that a rank lacks counts as zeros, which is right.
    *over("differ", "another layer by data", "another_layer", _BOTH, [_stage(1, GLOO)], may_end=True),
    *over("differ", "another layer on 1 of 3 ranks", "another_layer",
          (told("rank 1", "in step"),) * 3, [GLOO, SHM]),
    *over("differ", "one micro-step more", "one_micro_step_more", _BOTH,
          [GLOO, SHM_COMPILED, _stage(0, GLOO), _stage(1, SHM)]),
    *over("differ", "one optimizer step more", "one_optimizer_step_more", _BOTH,
          [GLOO, SHM, _stage(1, GLOO), _stage(1, GLOO_COMPILED)]),
    *over("differ", "load_state_dict on rank 0 alone", "loads_weights_alone", _BOTH,
          [SHM, _stage(0, GLOO), _stage(1, GLOO)]),
    *over("differ", "leaves a step out", "leaves_a_step_out", _BOTH,
          [GLOO_COMPILED, _stage(1, GLOO)]),
    *over("differ", "own loop leaves a step out", "own_loop_leaves_a_step_out", _BOTH,
          [GLOO, _stage(2, GLOO)]),
    *over("differ", "recompile limit of one rank", "recompile_limit_of_one_rank", _BOTH,
          [GLOO_COMPILED, SHM_COMPILED], may_end=True, limit_s=20),
    *over("differ", "two engines in another order", "two_engines_in_another_order", _BOTH,
          [GLOO, SHM]),
    *over("differ", "barrier of the user on one rank alone", "user_collective_alone", _ANY,
          [GLOO, SHM], arguments={"what": "barrier"}),
    *over("differ", "all_reduce of the user on one rank alone", "user_collective_alone", _ANY,
          [GLOO], arguments={"what": "all_reduce"}),
    *over("differ", "barrier of the user as the last thing", "user_collective_as_the_last_thing",
          _LAST, [GLOO], arguments={"who": 0}),
    *over("differ", "barrier of the user on rank 1 as the last thing",
          "user_collective_as_the_last_thing",
          (exits(0), told("rank 0 has ended its program", "barrier")), [GLOO], arguments={"who": 1}),
    *over("differ", "hybrid, rank 3 takes another layer", "one_rank_of_a_half_differs",
          (told("rank 3"),) * 4, [replace(GLOO, config=_HYBRID)], arguments={"what": "layer"}),
    *over("differ", "hybrid, rank 3 evaluates alone", "one_rank_of_a_half_differs",
          (told("rank 3"),) * 4, [replace(GLOO, config=_HYBRID)], arguments={"what": "evaluates"}),
]  # fmt: skip
