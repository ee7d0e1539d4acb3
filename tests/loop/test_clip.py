"""Clipping in own loops: one norm over all ranks, by our function and by torch's, of one model or several."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip  # before any model is sharded
from torch.nn.utils import get_total_norm

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from torchloom.errors import NonFiniteError, ShardError


def pair(seed: int) -> tuple[nn.Module, nn.Module, nn.Linear]:
    """Return two models and a layer that nobody shards."""
    return tricky(seed), tricky(seed + 1), nn.Linear(5, 3)


def backward(models: tuple[nn.Module, nn.Module, nn.Linear], ranks: range) -> None:
    first, second, plain = models
    for rank in ranks:
        total = first(tokens(0, rank)) + 3 * second(tokens(1, rank))
        (total / len(ranks)).backward()
    plain(torch.ones(2, 5)).square().sum().backward()


def gradients(models: tuple[nn.Module, nn.Module]) -> list[torch.Tensor]:
    return [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("stages", [(3, 3), (2, 0), (3, 0)])
def test_norms_equal_those_of_one_process(stages) -> None:
    models = pair(0)
    backward(models, range(3))
    both = torch_clip([p for m in models[:2] for p in m.parameters()], 0.3).item()
    rest = torch_clip([*models[0].up.parameters(), *models[2].parameters()], 0.1).item()

    def fn(rank: int):
        models = pair(0)
        for model, stage in zip(models, stages, strict=False):
            torchloom.shard_model(model, stage=stage, persistence_threshold=20)
        backward(models, range(rank, rank + 1))
        sharded = models[:2]
        before = [p.grad.clone() for m in sharded for p in m.parameters() if p.grad is not None]
        ours = torchloom.clip_grad_norm_(sharded, 1e9).item()
        untouched = all(map(torch.equal, before, gradients(sharded)))
        total = get_total_norm(gradients_of(sharded)).item()
        theirs = torch_clip([p for m in sharded for p in m.parameters()], 0.3).item()
        clipped = torchloom.clip_grad_norm_(sharded, 0.3).item()
        some = torch_clip([*models[0].up.parameters(), *models[2].parameters()], 0.1).item()
        return untouched, ours, total, theirs, clipped, some

    for untouched, ours, total, theirs, clipped, some in run_ranks(3, fn):
        assert untouched
        assert [ours, total, theirs] == pytest.approx([both] * 3, rel=1e-5)
        assert clipped == pytest.approx(0.3, rel=1e-4)
        assert some == pytest.approx(rest, rel=1e-5)


def test_norms_of_any_order_equal_those_of_one_process() -> None:
    orders = (1, 3, 0.5, float("inf"))
    bounds = (1.0, 1.0, 10.0, 1e-3)

    models = pair(0)
    backward(models, range(2))
    params = [p for m in models for p in m.parameters() if p.numel()]  # torch has no inf of none
    grads, sharded = (
        [p.grad for m in some for p in m.parameters() if p.grad is not None and p.numel()]
        for some in (models, models[:2])
    )
    expected = [get_total_norm(grads, kind).item() for kind in orders]
    apart = [get_total_norm(sharded, kind).item() for kind in orders]
    bounded = []
    for kind, bound in zip(orders, bounds, strict=True):
        torch_clip(params, bound, norm_type=kind)
        bounded.append(get_total_norm(grads).item())

    def fn(rank: int):
        found = []
        for stages in [(3, 2), (1, 0)]:
            models = pair(0)
            for model, stage in zip(models, stages, strict=False):
                torchloom.shard_model(model, stage=stage, persistence_threshold=20)
            backward(models, range(rank, rank + 1))
            ours = [torchloom.clip_grad_norm_(models[:2], 1e9, kind).item() for kind in orders]
            params = [p for m in models for p in m.parameters() if p.numel()]
            grads = [p.grad for p in params if p.grad is not None]
            theirs, after = [get_total_norm(grads, kind).item() for kind in orders], []
            for kind, bound in zip(orders, bounds, strict=True):
                torch_clip(params, bound, norm_type=kind)
                after.append(get_total_norm(grads).item())
            if rank == 1:  # a whole one that is NaN on this rank alone
                models[1].norm.bias.grad.fill_(float("nan"))
            nans = [torchloom.clip_grad_norm_(models[:2], 1e9, kind).item() for kind in orders]
            found.append((ours, theirs, after, nans))
        return found

    for found in run_ranks(2, fn):
        for ours, theirs, after, nans in found:
            assert ours == pytest.approx(apart, rel=1e-5)
            assert theirs == pytest.approx(expected, rel=1e-5)
            assert after == pytest.approx(bounded, rel=1e-5)
            assert nans == pytest.approx([float("nan")] * 4, nan_ok=True)


def gradients_of(models) -> list[torch.Tensor]:
    """Return the gradients themselves."""
    return [p.grad for model in models for p in model.parameters() if p.grad is not None]


def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    def fn(rank: int) -> None:
        model = torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        model(tokens(0, rank)).backward()
        for kind in (0, -float("inf")):
            with pytest.raises(
                ShardError, match=f"a norm of type {kind} over gradients of sharded"
            ):
                torch_clip(model.parameters(), 1.0, norm_type=kind)
        with pytest.raises(ShardError, match="was given no model"):
            torchloom.clip_grad_norm_([], 1.0)
        with pytest.raises(ShardError, match="this Linear is not sharded"):
            torchloom.clip_grad_norm_([model, nn.Linear(2, 2)], 1.0)

    run_ranks(2, fn)


def test_a_norm_that_is_not_finite() -> None:
    def fn(rank: int):
        model = torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        model(tokens(0, rank)).backward()
        if rank == 1:
            torchloom.shard.local_shard(dict(model.named_parameters())["up.weight"].grad)[0] = (
                float("nan")
            )
        before = gradients((model, model))
        with pytest.raises(NonFiniteError, match="the norm of the gradients over all ranks"):
            torch_clip(model.parameters(), 1.0, error_if_nonfinite=True)
        after = gradients((model, model))
        same = all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7))
            for a, b in zip(before, after, strict=True)
        )
        return same, torch_clip(model.parameters(), 1.0).isnan().item()

    assert run_ranks(2, fn) == [(True, True)] * 2


def test_models_that_are_not_sharded_keep_torchs_norm() -> None:
    def fn(rank: int):
        torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        plain = nn.Linear(5, 3)
        nn.init.ones_(plain.weight), nn.init.zeros_(plain.bias)
        plain(torch.ones(2, 5)).sum().backward()
        if rank:
            return None  # no other rank is asked
        return [
            torch_clip(plain.parameters(), 1e9, norm_type=kind).item()
            for kind in (2.0, float("inf"), 1.0)
        ]

    expected = [(30 * 0 + 15 * 4 + 3 * 4) ** 0.5, 2.0, 36.0]
    assert run_ranks(2, fn)[0] == pytest.approx(expected)


def test_torchs_function_stays_what_it_was_and_other_models_do_not_matter() -> None:
    def fn(rank: int):
        same = torch.nn.utils.get_total_norm is torch.nn.utils.clip_grad._get_total_norm
        changed = torchloom.shard_model(tricky(), persistence_threshold=20)
        changed.late = nn.Parameter(torch.ones(3))
        del changed.down
        model = torchloom.shard_model(tricky(), persistence_threshold=20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(tokens(0, 0)).backward()
        norm = torch_clip(model.parameters(), 0.1)
        optimizer.step()
        states = optimizer.state_dict()["state"]
        return same, norm.item(), norm.requires_grad, len(states)

    plain = tricky()
    plain(tokens(0, 0)).backward()
    expected = torch_clip(plain.parameters(), 0.1).item()
    for same, norm, requires_grad, num_states in run_ranks(2, fn):
        assert (same, requires_grad) == (True, False)
        assert norm == pytest.approx(expected, rel=1e-5)
        assert num_states > 5


def test_clipping_inside_of_compiled_code() -> None:
    def fn(rank: int) -> list[float]:
        model = torchloom.shard_model(tricky(), persistence_threshold=20)
        model(tokens(0, 0)).backward()
        clips = [
            lambda: torch_clip(model.parameters(), 1e9),
            lambda: torchloom.clip_grad_norm_(model, 1e9),
            lambda: torchloom.all_reduce(torchloom.clip_grad_norm_(model, 1e9), name="norm"),
        ]
        return [torch.compile(clip, backend="aot_eager")().item() for clip in clips]

    plain = tricky()
    plain(tokens(0, 0)).backward()
    expected = torch_clip(plain.parameters(), 1e9).item()
    for norms in run_ranks(2, fn):
        assert norms == pytest.approx([expected] * 3, rel=1e-5)
