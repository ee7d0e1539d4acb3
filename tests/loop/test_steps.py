"""`StepEnded` in loops without an engine, and `log_to=` of `torchloom.compile`."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from torchloom.errors import ConfigError
from torchloom.events import Recorder, StepEnded


def loop(rank, stage, num_steps, *, clip=None, knows_optimizer=True, **more):
    model = torchloom.shard_model(tricky(), stage=stage, persistence_threshold=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = torchloom.compile(
        model, optimizer=optimizer if knows_optimizer else None, backend="aot_eager", **more
    )
    norms = []
    with Recorder() as recorder:
        for step in range(num_steps):
            model(tokens(step, rank, batch=3 if step < 2 else 5)).backward()
            if clip is not None:
                norms.append(float(clip(model)))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] /= 2
    told = [event for event in recorder.events if isinstance(event, StepEnded)]
    return told, norms, len(session.report.graphs)


def by_torch(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_torchloom(model):
    return torchloom.clip_grad_norm_(model, 0.1)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", [None, by_torch, by_torchloom])
def test_a_loop_of_ones_own_tells_what_is_known(stage: int, clip) -> None:
    def fn(rank):
        return loop(rank, stage, 4, clip=clip)

    first, second = run_ranks(2, fn)
    for rank, (told, norms, num_graphs) in enumerate((first, second)):
        assert [(each.step, each.rank) for each in told] == [(step, rank) for step in (1, 2, 3, 4)]
        assert [each.lr for each in told] == [1e-2 / 2**step for step in range(4)]
        assert [each.grad_norm for each in told] == (norms or [None] * 4)
        assert all(each.collectives > 0 and each.seconds > 0 for each in told)
        assert told[0].recompiles == told[1].recompiles == told[3].recompiles == 0
        assert told[2].recompiles == num_graphs - told[0].graphs > 0
        assert told[0].loss is None and told[0].tokens is None
        assert all(0 < each.wait_seconds < each.seconds for each in told)
    assert [each.collectives for each in first[0]] == [each.collectives for each in second[0]]


def test_log_to_gets_metrics_on_rank_0() -> None:
    def fn(rank):
        heard = []
        loop(rank, 3, 2, clip=by_torchloom, log_to=lambda *got: heard.append(got))
        return heard

    heard, none = run_ranks(2, fn)
    assert none == [] and [step for _, step in heard] == [1, 2]
    names = {"seconds", "lr", "grad_norm", "collectives", "recompiles", "peak_bytes", "graphs"}
    assert names < set(heard[0][0]) and "loss" not in heard[0][0]


def test_without_an_optimizer_its_rate_is_not_known() -> None:
    def fn(rank):
        return loop(rank, 3, 1, knows_optimizer=False)[0]

    ((told,), _) = run_ranks(2, fn)
    assert told.lr is None and told.collectives > 0


def test_a_norm_belongs_to_the_step_that_follows_it_alone() -> None:
    def fn(rank):
        calls = iter((True, False))
        clip = lambda model: by_torchloom(model) if next(calls) else 0.0  # noqa: E731
        return loop(rank, 3, 2, clip=clip)[0]

    for told in run_ranks(2, fn):
        assert told[0].grad_norm > 0 and told[1].grad_norm is None


def test_a_model_is_freed_although_its_steps_are_told() -> None:
    def fn(rank):
        model = torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torchloom.compile(model, optimizer=optimizer, backend="eager", log_to=lambda *got: None)
        model(tokens(0, rank)).backward()
        optimizer.step()
        gone = weakref.ref(optimizer)
        del model, optimizer
        torch._dynamo.reset()
        gc.collect()
        return gone() is None

    assert run_ranks(2, fn) == [True, True]


def test_what_cannot_be_called_is_refused_before_anything_is_compiled() -> None:
    def fn(rank):
        model = torchloom.shard_model(tricky(), stage=3, persistence_threshold=20)
        with pytest.raises(ConfigError, match="log_to was given a str"):
            torchloom.compile(model, backend="eager", log_to="wandb")
        torchloom.compile(model, backend="eager")
        return float(model(tokens(0, rank)).detach())

    assert run_ranks(1, fn)[0] > 1
