"""Engines of one process count what they move between device and host themselves."""

from __future__ import annotations

import gc

import torch
from torch import nn

from support.pool import run_ranks
from support.runs import sharded
from torchloom.runtime import mover_of


def started(seed: int, *, states: bool = False, activations: bool = False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    return sharded(
        model,
        stage=1,
        optimizer={"type": "AdamW", "params": {"lr": 0.1}},
        backend="aot_eager" if activations else None,
        zero={"offload_optimizer": {"device": "cpu" if states else "none"}},
        compile={"offload_activation": activations, "offload_activation_threshold": 1},
    )


def parts(engine) -> tuple[int, ...]:
    found = engine.move_stats()
    kept = found.host_bytes, found.host_peak_bytes
    moved = found.offloaded_bytes, found.reloaded_bytes
    return (*kept, *moved, found.in_flight_peak_bytes)


def train(engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(3, 8)).square().mean())
        engine.step()


def test_engines_count_what_they_move_themselves() -> None:
    def fn(rank):
        alone = started(1, states=True)
        train(alone, 3)
        before = parts(alone)
        with_states, with_neither = started(1, states=True), started(2)
        for _ in range(3):
            train(with_neither, 1)
            train(with_states, 1)
        assert parts(alone) == before
        assert parts(with_states) == before
        assert parts(with_neither) == (0,) * 5
        total = mover_of(torch.device("cpu")).stats()
        assert total.offloaded_bytes == 2 * before[2]
        assert total.host_bytes == 2 * before[0]
        del alone, with_states
        gc.collect()
        assert mover_of(torch.device("cpu")).stats().host_bytes == 0
        return before

    for before in run_ranks(2, fn):
        assert min(before[:4]) > 0


def test_activations_are_those_of_the_engine_that_moved_them() -> None:
    def fn(rank):
        alone = started(1, activations=True)
        train(alone, 1)
        wanted = parts(alone)
        offloading, other = started(1, activations=True), started(2)
        other.backward(other(offloading(torch.ones(3, 8))).square().mean())
        assert parts(other) == (0,) * 5
        assert parts(offloading) == wanted
        return wanted

    for wanted in run_ranks(2, fn):
        assert wanted[2] == wanted[3] > 0
