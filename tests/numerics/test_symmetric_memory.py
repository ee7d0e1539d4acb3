"""Shared memory changes where bytes travel, not one bit of what is computed.

Two ranks: bitwise, at every stage. More ranks: gloo's own all-reduce, which whole parameters take,
adds in another order than ours, so the last bits may differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.pool import run_ranks
from support.runs import make_engine, train

SHARED = {"symmetric_memory": True, "strict": True}
STEPS = 4


def differences(rank: int, backend: str | None, stage: int, **rest: Any) -> tuple[bool, float, int]:
    """Train over gloo and over shared memory; return same losses, largest error, kind of transport."""
    runs = []
    for options in ({"strict": True}, SHARED):
        engine, model = make_engine(stage, compile=options, **rest)
        if backend is not None:
            engine.compile(backend=backend)
        losses = train(engine, rank, STEPS)
        runs.append((losses, model.state_dict(), engine))
    (losses, want, _), (ours, got, engine) = runs
    assert type(engine.world.comm.shard).__name__ == "SharedMemoryCollectives"
    errors = [
        (got[k].double() - want[k].double()).abs().max().item() for k in want if want[k].numel()
    ]
    moved = (want["up.weight"] - runs[0][1]["down.weight"].mT).abs().max().item()
    assert moved > 0
    return ours == losses, max(errors), engine.skipped_steps


@pytest.mark.parametrize(
    ("stage", "backend"),
    [*((stage, backend) for stage in range(4) for backend in (None, "aot_eager")), (3, "inductor")],
)
def test_two_ranks_bitwise(stage: int, backend: str | None) -> None:
    def fn(rank):
        return differences(
            rank, backend, stage, gradient_accumulation_steps=2, gradient_clipping=0.5
        )

    assert run_ranks(2, fn) == [(True, 0.0, 0)] * 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_ranks(stage: int, backend: str | None) -> None:
    results = run_ranks(3, lambda rank: differences(rank, backend, stage))
    assert all(error < 2e-6 for _, error, _ in results)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    "precision",
    [
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}},
    ],
)
def test_sixteen_bits_and_skipped_steps(precision: dict[str, Any], backend: str | None) -> None:
    results = run_ranks(2, lambda rank: differences(rank, backend, 3, **precision))
    assert [result[:2] for result in results] == [(True, 0.0)] * 2
    assert (results[0][2] > 0) == ("fp16" in precision)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_hybrid_sharding(backend: str | None) -> None:
    def fn(rank):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 20, "shard_size": 2}
        return differences(rank, backend, 3, zero_optimization=zero)

    assert run_ranks(4, fn) == [(True, 0.0, 0)] * 4
