"""Equal layers that are compiled as one body train to the weights of the flat compile, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchloom
from support import zoo
from support.checkpointed_layers import Checkpointed, Selective
from support.equal_layers import (
    Caching,
    Collecting,
    Dropouts,
    Images,
    InPlace,
    LowRank,
    Mixed,
    Normed,
    Parts,
    Residual,
    Watched,
)
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


MODELS = {"llama": (llama, [5]), "encoder": (encoder, [5])}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("llama", 0),
        ("llama", 3),
        ("encoder", 3),
        pytest.param("llama", 1, marks=pytest.mark.exhaustive),
        pytest.param("llama", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_equal_layers_train_as_in_the_flat_graph(name: str, stage: int) -> None:
    make, calls = MODELS[name]
    check(make, calls=calls, stage=stage)


KINDS = {
    "no grad inside": [6],
    "written results": [6],
    "written stream": [],
    "own derivative": [6],
    "autocast around": [6],
    "autocast within": [6],
    "twice with dropout": [12],
    "strides": [],  # gradients lie otherwise than results, which under aot_eager stays flat
    "conjugates": [5],
    "constants": [6],
    "functions of users": [],
    "read twice at once": [6, 5],
    "storage behind": [],
}
"""How many layers are calls of one body."""


def of(kind: type[nn.Module], *sizes: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return kind(**options), (torch.randn(*sizes),)

    return make


def experts() -> Any:
    blocks = [
        zoo.Block(48, zoo.Attention(48, 4, 2), zoo.Experts(48, 40, 4), zoo.Norm) for _ in range(4)
    ]
    return zoo.Lm(blocks, 48), (torch.randint(0, 131, (2, 21)),)


def tied_between() -> Any:
    model, batch = zoo.llama(layers=5)
    for block in model.blocks[1:]:
        block.mlp = model.blocks[0].mlp
    return model, batch


def half_frozen() -> Any:
    model, batch = zoo.llama(layers=9)
    model.embed.requires_grad_(False)
    model.blocks[:4].requires_grad_(False)
    return model, batch


def recurrence() -> Any:
    return zoo.Gru(), (torch.randn(3, 9, 23),)


SHARDED = {
    "experts": (experts, [4]),
    "low rank": (of(LowRank, 3, 24), [4]),
    "half frozen": (half_frozen, [4, 4]),
    "tied between layers": (tied_between, [5]),
    "dropout": (of(Dropouts, 3, 7, 24, layers=6), [5]),
    "selective": (lambda: (Selective("products", *["gelu"] * 5), (torch.randn(3, 7, 24),)), [5]),
    "checkpointed dropout": (of(Checkpointed, 3, 7, 24, p=0.3, layers=6), [5]),
}
ODD = {
    "two kinds, then one": (of(Mixed, 3, 20), [4, 4]),
    "collecting": (of(Collecting, 3, 20), [5]),
    "watched": (of(Watched, 3, 20), []),
    # Gradients lie otherwise than results here, too; Inductor, which copies them, calls bodies (below).
    "caching": (of(Caching, 3, 7, 24), []),
    "buffers": (of(Normed, 9, 12), []),
    "in place": (of(InPlace, 9, 12), [5]),
    "recurrence": (recurrence, []),
    **{name: (of(Residual, 5, 16, what=name), calls) for name, calls in KINDS.items()},
}


def check_all(models: dict[str, Any], num_ranks: int = 2, rounding: float = 0.0) -> None:
    """Compare several models with their flat graphs in one set of ranks.

    Args:
        models: by name.
        num_ranks: of the set.
        rounding: how much losses and weights may differ where layers hand on several values.
    """

    def run(rank: int) -> list[Any]:
        # Dynamo makes an object of torch.autograd.Function to trace one of a user.
        warnings.filterwarnings("ignore", message=".*should not be instantiated")
        found = []
        for make, _ in models.values():
            ways = []
            for regions in (False, True):
                torch._dynamo.reset()
                ways.append(train(make, rank, regions=regions))
            found.append(tuple(ways))
        return found

    results, *_ = run_ranks(num_ranks, run, timeout_s=400)
    for (name, (_, calls)), (flat, found) in zip(models.items(), results, strict=True):
        assert found.fallbacks == [] and flat.fallbacks == [], name
        assert found.losses == pytest.approx(flat.losses, rel=rounding, abs=rounding), name
        for ours, theirs in zip(found.weights, flat.weights, strict=True):
            assert ours == pytest.approx(theirs, rel=rounding, abs=100 * rounding), name
        assert flat.losses[0] != flat.losses[-1], name
        assert (flat.calls, found.calls) == ([], calls), (name, found.reasons, found.calls)


@pytest.mark.parametrize("part", range(2))
def test_sharded_layers_of_other_kinds_train_as_in_the_flat_graph(part: int) -> None:
    check_all(dict(list(SHARDED.items())[part::2]))


@pytest.mark.parametrize("part", range(5))
def test_odd_layers_train_as_in_the_flat_graph(part: int) -> None:
    check_all(dict(list(ODD.items())[part::5]), num_ranks=1, rounding=1e-6)


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "small buckets": {
        "compile": {"offload_activation": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 3000,
            "stage3_prefetch_bucket_size": 9000,
        },
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_the_same(name: str) -> None:
    check(llama, calls=[5], config=SETTINGS[name])


def test_inductor_takes_tensors_as_they_lie() -> None:
    models = [of(Parts, 5, 12), of(Images, 2, 3, 9, 11), of(Caching, 3, 7, 24, turned=True)]

    def run(rank: int) -> list[Any]:
        found = []
        for make in models:
            for regions in (False, True):
                torch._dynamo.reset()
                found.append(train(make, rank, regions=regions, backend="inductor"))
        return found

    (found,) = run_ranks(1, run, timeout_s=400)
    for make, flat, bodies in zip(models, found[::2], found[1::2], strict=True):
        kind = type(make()[0]).__name__
        assert bodies.calls != [] == flat.calls, (kind, bodies.reasons)
        assert bodies.losses == pytest.approx(flat.losses, rel=1e-6)


def test_inductor_trains_to_nearly_the_same() -> None:
    flat, found = both(gpt2, backend="inductor")
    assert found.calls == [4]
    torch.testing.assert_close(found.losses, flat.losses, rtol=1e-6, atol=0)
