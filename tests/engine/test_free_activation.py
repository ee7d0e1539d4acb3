"""`free_activation`: saved values die after their last use also under backends that keep arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchloom
from support.memory import measure
from support.pool import run_ranks
from support.runs import sharded
from support.zoo import ZOO, Mlp
from torchloom.memory import measure_peak

FREE = {"free_activation": True, "free_activation_threshold": 1}


def keeps(gm, inputs):
    """A backend that takes its arguments one by one, and so keeps them until it returns."""
    return gm.forward


def made(model, options: dict[str, Any]) -> torchloom.Engine:
    torch._dynamo.reset()
    engine = sharded(model, batch=1, threshold=10, compile={"strict": True, **options})
    engine.compile(backend=options.get("backend", keeps))
    return engine


def peak_of(options: dict[str, Any], width: int = 256, num: int = 10):
    torch.manual_seed(0)
    model, x = Mlp((width,) * (num + 1), torch.tanh), torch.randn(1024, width)
    engine = made(model, options)

    def micro():
        loss = engine(x)
        engine.backward(loss)
        return loss.item()

    engine.backward(engine(x))
    engine.zero_grad()
    peak = measure_peak(micro).peak_bytes
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    return peak, grads, engine.compile_report().graphs[0].collectives


def test_the_peak_falls_to_that_of_a_backend_that_frees() -> None:
    def fn(rank):
        names = {"keeps": {}, "frees": FREE, "boxed": {"backend": "aot_eager"}}
        names["off"] = {**FREE, "disable_passes": ["free_activation"]}
        names["large"] = {"free_activation": True}  # each is smaller than the threshold
        return {name: peak_of(options) for name, options in names.items()}

    (found,) = run_ranks(1, fn)
    peaks = {name: peak for name, (peak, _, _) in found.items()}
    activation = 1024 * 256 * 4
    assert peaks["frees"] <= peaks["boxed"] + activation
    assert peaks["keeps"] >= peaks["frees"] + 2 * activation
    assert peaks["off"] == peaks["large"] == peaks["keeps"]
    assert found["frees"][2]["backward torchloom.free_"] > 0
    assert "backward torchloom.free_" not in found["off"][2]
    for _, grads, _ in found.values():
        for name, grad in grads.items():
            assert torch.equal(grad, found["keeps"][1][name]), name


def test_backends_that_free_themselves_are_left_alone() -> None:
    def fn(rank):
        return [peak_of({**FREE, "backend": each}, 32, 3)[2] for each in ("inductor", "aot_eager")]

    for collectives in run_ranks(1, fn)[0]:
        assert not any("free_" in name for name in collectives)


@pytest.mark.parametrize("name", ["llama_tied", "gru", "in_place", "two_results", "frozen", "conv"])
def test_models_of_all_kinds(name: str) -> None:
    """What others can still read stays: results, inputs, buffers, values that are two at once."""

    def fn(rank):
        found = []
        for options in ({}, FREE):
            torch.manual_seed(7)
            model, batch = ZOO[name]()
            engine = made(model, options)
            for _ in range(2):
                result = engine(*batch)
                results = result if isinstance(result, tuple) else (result,)
                engine.backward(results[0])
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            buffers = dict(model.named_buffers())
            found.append(
                ({f"{i}": r.detach().clone() for i, r in enumerate(results)}, grads, buffers)
            )
        return found

    ((plain, freed),) = run_ranks(1, fn)
    assert plain[1]
    for left, right in zip(plain, freed, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), key


def test_a_graph_that_is_kept_frees_nothing() -> None:
    def fn(rank):
        found = []
        for options in ({}, FREE):
            torch.manual_seed(1)
            model = Mlp((17, 33, 5), torch.tanh)
            engine = made(model, options)
            loss = engine(torch.linspace(-1, 1, 51).view(3, 17))
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            found.append([param.grad.clone() for param in model.parameters()])
        return found

    ((plain, freed),) = run_ranks(1, fn)
    for left, right in zip(plain, freed, strict=True):
        assert torch.equal(left, right)


def test_nothing_is_lost_over_many_steps() -> None:
    def fn(rank):
        torch.manual_seed(1)
        model = Mlp((17, 33, 5), torch.tanh)
        engine = made(model, FREE)

        def steps(count):
            for _ in range(count):
                engine.backward(engine(torch.ones(3, 17)))
                engine.zero_grad()

        steps(2)
        return measure(lambda: steps(30)).kept

    assert run_ranks(1, fn) == [0]
