"""Equal layers that are compiled as one body train to the weights of the flat compile, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support import zoo
from support.pool import run_ranks

STEPS = 3


class Trained:
    """What a run came to, in numbers that can be compared."""

    def __init__(self, losses: list[float], weights: list[list[float]], report: Any) -> None:
        self.losses, self.weights = losses, weights
        self.calls = [len(each.layers) for graph in report.graphs for each in graph.regions]
        self.reasons = [each for graph in report.graphs for each in graph.flat_because]
        self.fallbacks = report.fallbacks


def train(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
    rank: int,
    *,
    regions: bool,
    stage: int = 3,
    backend: str = "aot_eager",
    config: dict[str, Any] | None = None,
) -> Trained:
    torch.manual_seed(0)
    model, batch = make()
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50},
        "steps_per_print": float("inf"),
        **copy.deepcopy(config or {}),
    }
    given["compile"] = {"strict": True, "regions": regions, **given.get("compile", {})}
    engine, *_ = torchloom.initialize(model=model, config=given)
    engine.compile(backend=backend)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        own = tuple(each if each.dtype is torch.long else each + 0.1 * rank for each in batch)
        loss = engine(*own)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [each.flatten().tolist() for each in engine.module.state_dict().values()]
    return Trained(losses, weights, engine.compile_report())


def both(make: Any, **options: Any) -> tuple[Trained, Trained]:
    def run(rank: int) -> tuple[Trained, Trained]:
        return tuple(train(make, rank, regions=each, **options) for each in (False, True))

    first, _ = run_ranks(2, run, timeout_s=300)
    return first


def check(make: Any, *, calls: list[int] | None = None, **options: Any) -> Trained:
    flat, found = both(make, **options)
    assert found.fallbacks == [] and flat.fallbacks == []
    assert flat.calls == []
    assert found.losses == flat.losses
    assert found.weights == flat.weights
    assert flat.losses[0] != flat.losses[-1]
    if calls is not None:
        assert found.calls == calls, found.reasons
    return found


def llama() -> Any:
    return zoo.llama(layers=5)


def gpt2() -> Any:
    return zoo.gpt2(layers=4)


def encoder() -> Any:
    return zoo.Encoder(layers=5), (torch.randint(0, 97, (3, 7)), torch.randint(0, 3, (3,)))


MODELS = {"llama": (llama, [5]), "gpt2": (gpt2, [4]), "encoder": (encoder, [5])}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_train_as_in_the_flat_graph(name: str, stage: int) -> None:
    make, calls = MODELS[name]
    check(make, calls=calls, stage=stage)
