"""Stage 1 in loops of one's own: whole weights, and states of a slice for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from support.models import Tricky, tokens, tricky
from support.pool import run_ranks
from support.runs import assert_equal, weights
from torchloom.errors import TorchloomError


def start(stage: int = 1) -> Tricky:
    model = tricky()
    torchloom.shard_model(model, stage=stage, persistence_threshold=20)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def steps(model: nn.Module, optimizers: list[Any], rank: int, last: int, first: int = 0) -> Any:
    losses, norms = [], []
    for step in range(first, last):
        loss = model(tokens(step, rank))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_equal_to_whole_states_with_half_of_them(backend) -> None:
    def run(rank: int) -> Any:
        found = []
        for stage in (0, 1):
            model = start(stage)
            optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
            if backend:
                torchloom.compile(model, backend=backend, optimizer=optimizer, strict=True)
            run = steps(model, [optimizer], rank, 4)
            held = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
            found.append((run, weights(model), held, optimizer.state_dict()["state"]))
        return found

    results = run_ranks(2, run)
    for expected, found in results:
        assert found[0] == expected[0]  # losses and norms, exactly
        assert_equal(found[1], expected[1])
        assert found[2] < 0.6 * expected[2]
        for index, state in expected[3].items():
            for key, value in state.items():
                assert torch.equal(found[3][index][key], value), (index, key)
    for name, value in results[0][1][1].items():
        if name != "shift":  # a buffer of statistics differs by rank
            assert torch.equal(results[1][1][1][name], value), name


def test_gradients_and_parameters_are_whole_after_a_step_and_after_one_that_raised() -> None:
    class Raises(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("out of luck")

    def run(rank: int) -> Any:
        model = start()
        shapes = [tuple(param.shape) for param in model.parameters()]
        good = torch.optim.SGD(trained(model), lr=0.1)
        model(tokens(0, rank)).backward()
        grads = [param.grad.clone() for param in trained(model)]
        good.step()
        kept = [param.grad.clone() for param in trained(model)]
        with pytest.raises(RuntimeError, match="out of luck"):
            Raises(trained(model), lr=0.1).step()
        during = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        loss = model(tokens(1, rank))
        same = all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        now = [tuple(param.shape) for param in model.parameters()]
        return same, shapes == now, during, loss.item()

    for same, whole, during, _ in run_ranks(2, run):
        assert same
        assert whole
        expected = {name: tuple(value.shape) for name, value in tricky().state_dict().items()}
        assert during == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_a_closure_runs_on_whole_weights_once(compiled) -> None:
    def run(rank: int, with_closure: bool) -> Any:
        model = start()
        if compiled:
            torchloom.compile(model, backend="aot_eager")
        optimizer = torch.optim.Adam(trained(model), lr=0.1)
        losses = []
        for step in range(2):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = model(tokens(step, rank))
                loss.backward()
                return loss

            if with_closure:
                with torch.no_grad():
                    loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            losses.append(loss.item())
        return losses, weights(model)

    (found, other), (expected, _) = run_ranks(2, run, True), run_ranks(2, run, False)
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])
    assert_equal(other[1], expected[1])


def test_a_model_that_is_whole_again_is_stepped_whole() -> None:
    def run(rank: int) -> Any:
        model = start()
        torchloom.shard.unshard(model)
        optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
        model(tokens(0, 0)).backward()
        optimizer.step()
        return [
            tuple(optimizer.state[p]["momentum_buffer"].shape) == p.shape for p in trained(model)
        ]

    assert all(run_ranks(2, run)[1])


def test_a_step_that_only_one_rank_takes_is_told() -> None:
    def run(rank: int) -> str:
        model = start()
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        model(tokens(0, rank)).backward()
        with pytest.raises(TorchloomError) as told:
            if rank == 0:
                optimizer.step()
            optimizer.zero_grad()
            model(tokens(1, rank)).backward()
        return str(told.value)

    for told in run_ranks(2, run):
        assert told


@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_a_compiled_step_and_averaged_weights() -> None:
    def run(rank: int) -> Any:
        found = []
        for stage in (0, 1):
            torch._dynamo.reset()
            model = start(stage)
            optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
            step = torch.compile(optimizer.step, backend="aot_eager")
            averaged = torch.optim.swa_utils.AveragedModel(model)
            losses = []
            for at in range(3):
                loss = model(tokens(at, rank))
                loss.backward()
                step()
                optimizer.zero_grad(set_to_none=False)
                averaged.update_parameters(model)
                losses.append(loss.item())
            held = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
            found.append((losses, held, weights(averaged.module)))
        return found

    for expected, found in run_ranks(2, run):
        assert found[0] == expected[0]
        assert found[1] < 0.6 * expected[1]
        assert_equal(found[2], expected[2])
