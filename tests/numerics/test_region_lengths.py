"""Ranks whose lengths differ: one compiles for a length, the other for all, and both have the same calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchloom
from support.pool import run_ranks
from support.sized_layers import Shown, Sized

LENGTHS = {0: (7, 9, 12, 20), 1: (7, 7, 11, 7)}
KINDS = ["power", "logarithm", "padded", "rolled", "masked", "shortened", "heads", "shown"]


def train(
    rank: int, what: str, *, regions: bool, backend: str = "aot_eager"
) -> tuple[list[float], list[list[int]]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine, *_ = torchloom.initialize(
        model=Shown(layers=5) if what == "shown" else Sized(what),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
            "steps_per_print": float("inf"),
            "compile": {"strict": True, "regions": regions},
        },
    )
    engine.compile(backend=backend)
    losses = []
    for step, length in enumerate(LENGTHS[rank]):
        torch.manual_seed(10 * step + rank)
        loss = engine(torch.randn(2 + step % 3, length, 24))  # both sizes vary in the end
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    graphs = engine.compile_report().graphs
    return losses, [[len(each.layers) for each in graph.regions] for graph in graphs]


@pytest.mark.parametrize("what", KINDS)
def test_every_length_has_the_same_calls(what: str) -> None:
    def run(rank: int) -> list[Any]:
        return [train(rank, what, regions=each) for each in (False, True)]

    for (flat, _), (losses, calls) in run_ranks(2, run, timeout_s=200):
        assert losses == flat
        assert len(calls) >= 2
        assert all(each == [5] for each in calls), calls


@pytest.mark.exhaustive
def test_code_of_every_length_comes_to_the_losses_of_the_flat_graph() -> None:
    def run(rank: int) -> list[Any]:
        return [
            tuple(train(0, what, regions=each, backend="inductor") for each in (False, True))
            for what in KINDS
        ]

    (found,) = run_ranks(1, run, timeout_s=600)
    for what, ((flat, _), (losses, calls)) in zip(KINDS, found, strict=True):
        assert losses == pytest.approx(flat, rel=1e-6), what
        assert all(each == [5] for each in calls), (what, calls)
