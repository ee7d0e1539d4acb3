"""Equal layers of transformers' architectures are compiled once, and train as in the flat graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import torchloom
from integrations.test_zoo import ZOO, batch, make, settings, trained
from support.pool import run_ranks

LAYERS = {"gemma2": 8}
"""Of each stack, 6 where nothing is said; layers of gemma2 are of two kinds in turn."""
DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers")


class Trained(NamedTuple):
    """What a run came to."""

    losses: list[float]
    weights: list[list[float]]
    calls: list[int]
    """For each body, how many calls it has."""
    flat_because: list[str]
    fallbacks: list[str]


def deep_engine(name: str, *, regions: bool, backend: str) -> Any:
    torch._dynamo.reset()
    kind, config_kind, sizes = ZOO[name]
    deep = {key: LAYERS.get(name, 6) if key in DEPTHS else value for key, value in sizes.items()}
    engine, *_ = torchloom.initialize(
        model=make((kind, config_kind, deep)), config=settings(regions=regions)
    )
    engine.compile(backend=backend)
    return engine


def train(name: str, rank: int, *, regions: bool, backend: str) -> Trained:
    engine = deep_engine(name, regions=regions, backend=backend)
    losses = trained(engine, name, rank)
    report = engine.compile_report()
    return Trained(
        losses,
        [each.flatten().tolist() for each in engine.module.state_dict().values()],
        [len(each.layers) for graph in report.graphs for each in graph.regions],
        [each for graph in report.graphs for each in graph.flat_because],
        report.fallbacks,
    )


def both(name: str, backend: str) -> tuple[Trained, Trained]:
    def run(rank: int) -> tuple[Trained, ...]:
        return tuple(train(name, rank, regions=each, backend=backend) for each in (False, True))

    (flat, found), _ = run_ranks(2, run, timeout_s=600)
    assert flat.fallbacks == found.fallbacks == []
    assert flat.calls == []
    assert flat.losses[0] != flat.losses[-1]
    return flat, found


CALLS = {"gemma2": [4], "gemma3": [5], "bart": [6, 6], "t5": [5, 5], "whisper": []}
"""For each body how often it is called; one body that is called for all of 6 layers where nothing is said. Gradients of
whisper lie otherwise than results, so it stays flat under aot_eager."""
CALLS_OF_INDUCTOR = {**CALLS, "whisper": [6, 6]}
ROUNDED = ("t5", "bart", "whisper")
"""All layers of a decoder read the states of an encoder, whose gradients are then summed in another order."""
IN_CI = ("mistral", "gpt2", "mixtral", "t5")


@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in ZOO],
)
def test_architectures_train_to_the_weights_of_the_flat_graph(name: str) -> None:
    flat, found = both(name, "aot_eager")
    assert found.calls == CALLS.get(name, [6]), found.flat_because
    if name in ROUNDED:
        assert found.losses == pytest.approx(flat.losses, rel=1e-6)
        return
    assert found.losses == flat.losses
    are_equal = found.weights == flat.weights  # pytest would look for the difference for minutes
    assert are_equal


@pytest.mark.parametrize(
    "name",
    [
        name if name == "mistral" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ZOO
        if name != "vit"  # whose images have one size
    ],
)
def test_every_length_has_the_same_calls(name: str) -> None:
    lengths = (10, 9, 24)
    """Two are shorter than windows of attention, whose caches then show all."""

    def run(rank: int) -> list[tuple[list[int], list[str]]]:
        engine = deep_engine(name, regions=True, backend="aot_eager")
        for step, length in enumerate(lengths):
            given = {
                key: each[:, :length].contiguous() if each.dtype is torch.long else each
                for key, each in batch(name, step, rank).items()
            }
            engine.backward(engine(**given).loss)
            engine.step()
        graphs = engine.compile_report().graphs
        return [([len(e.layers) for e in each.regions], each.flat_because) for each in graphs]

    (graphs,) = run_ranks(1, run)
    assert len(graphs) >= 2
    assert all(calls == CALLS.get(name, [6]) for calls, _ in graphs), graphs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ZOO)
def test_compiled_code_of_architectures_comes_to_the_losses_of_the_flat_graph(name: str) -> None:
    flat, found = both(name, "inductor")
    assert found.calls == CALLS_OF_INDUCTOR.get(name, [6]), found.flat_because
    assert found.losses == pytest.approx(flat.losses, rel=1e-6)
