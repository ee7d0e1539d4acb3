"""Parameters of a loop of one's own that are left to the caller, and gradients that are no mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchloom
from support.models import Tricky, tokens, tricky
from support.pool import run_ranks
from torchloom.errors import EngineError, ShardError
from torchloom.shard import Precision, full_state_dict, gathered

RUNS = [(0, None), (1, None), (2, None), (3, None), (1, "aot_eager"), (3, "aot_eager")]


def of_rank(rank: int) -> Tricky:
    """Return a model of which one layer is the rank's own."""
    model = tricky()
    with torch.no_grad():
        model.up.weight.add_(0.1 * rank)
    return model


def expected() -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return what each rank's weights are after a step, and the norm of the gradients."""
    models = [of_rank(rank) for rank in range(2)]
    for rank, model in enumerate(models):
        model(tokens(0, rank)).backward()
    squares = 0.0
    for name, param in models[0].named_parameters():
        other = dict(models[1].named_parameters())[name]
        if param.grad is None:
            continue
        if not name.startswith("up."):
            param.grad = other.grad = (param.grad + other.grad) / 2
        squares += param.grad.square().sum().item()
    for model in models:
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    return [dict(model.state_dict()) for model in models], squares**0.5


def test_they_stay_this_ranks_own() -> None:
    def fn(rank: int) -> Any:
        found = []
        for stage, backend in RUNS:
            model = of_rank(rank)
            held = model.up.weight
            torchloom.shard_model(
                model, stage, persistence_threshold=20, ignored_params=model.up.parameters()
            )
            if backend:
                torchloom.compile(model, backend=backend, strict=True)
            with gathered(model, modifier_rank=0):
                pass
            model(tokens(0, rank)).backward()
            norm = torchloom.clip_grad_norm_(model, 1e9).item()
            assert model.up.weight is held
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            found.append((norm, {k: v.clone() for k, v in full_state_dict(model).items()}))
        with pytest.raises(ShardError, match=r"tensor of shape \(17, 12\) that is no parameter"):
            torchloom.shard_model(tricky(), ignored_params=[tricky().up.weight])
        model = tricky()
        precision = Precision(compute=torch.bfloat16)
        torchloom.shard_model(
            model, precision=precision, ignored_params=[model.norm.weight, model.norm.bias]
        )
        return found, model.norm.weight.dtype, model.up.weight.dtype

    weights, norm = expected()
    for rank, (found, own, others) in enumerate(run_ranks(2, fn)):
        assert (own, others) == (torch.float32, torch.bfloat16)
        for run, (got, whole) in zip(RUNS, found, strict=True):
            assert got == pytest.approx(norm, rel=1e-5), run
            for name, value in weights[rank].items():
                assert torch.allclose(whole[name], value, atol=1e-6), (run, name)


def test_a_sum_and_accumulation_inside_of_no_sync() -> None:
    def fn(rank: int) -> Any:
        found = []
        for stage, backend in RUNS:
            model = tricky()
            torchloom.shard_model(
                model, stage, persistence_threshold=20, gradient_divide_factor=0.5
            )
            if backend:
                torchloom.compile(model, backend=backend, strict=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with torchloom.no_sync(model):
                model(tokens(0, rank)).backward()
                with pytest.raises(EngineError, match=r"inside of torchloom\.no_sync"):
                    optimizer.step()
            model(tokens(1, rank)).backward()
            optimizer.step()
            found.append({k: v.clone() for k, v in full_state_dict(model).items()})
        twin = torchloom.shard_model(tricky(), 0)  # of another model's factor it sees nothing
        twin(tokens(0, rank)).backward()
        with pytest.raises(ShardError, match="gradient_divide_factor=0 divides no gradients"):
            torchloom.shard_model(tricky(), gradient_divide_factor=0)
        return found, twin.up.weight.grad.clone()

    model = tricky()
    for rank in range(2):
        model(tokens(0, rank)).backward()
    mean = model.up.weight.grad.clone() / 2
    for rank in range(2):
        model(tokens(1, rank)).backward()
    torch.optim.SGD(model.parameters(), lr=0.2).step()
    for found, of_twin in run_ranks(2, fn):
        assert torch.allclose(of_twin, mean, atol=1e-6)
        for run, whole in zip(RUNS, found, strict=True):
            for name, value in model.state_dict().items():
                assert torch.allclose(whole[name], value, atol=1e-6), (run, name)
