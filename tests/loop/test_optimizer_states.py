"""Optimizers of own loops: their state dicts are those of a run without sharding, on any number of ranks."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import torchloom
from support.models import Tricky, tokens, tricky
from support.pool import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import (
    full_optimizer_state_dict,
    full_state_dict,
    local_shard,
    state_dict_mode,
)
from torchloom.shard import whole_states as attach

KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "no momentum": lambda params: torch.optim.SGD(params, lr=1e-2),
}
BATCHES = 6
"""Of each step, divided among the ranks."""


def loss_of(model: nn.Module, step: int, batches: range) -> torch.Tensor:
    return torch.stack([model(tokens(step, batch)) for batch in batches]).mean()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, of which the second has the tied weight first."""
    named = dict(model.named_parameters())
    second = [named.pop("embed.weight"), named.pop("down.bias")]
    optimizer = KINDS[kind]([p for p in named.values() if p.requires_grad])
    optimizer.add_param_group({"params": second, "lr": 3e-3})
    return optimizer


def start(stage: int, seed: int = 0) -> Tricky:
    model = tricky(seed)
    torchloom.shard_model(model, stage=stage, persistence_threshold=20)
    return model


def steps(model: nn.Module, optimizer, rank: int, size: int, first: int, last: int) -> list[float]:
    """Train and return the norms before clipping, which torch's own function takes."""
    norms = []
    share = BATCHES // size
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, step, range(rank * share, (rank + 1) * share)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms


def assert_close(found: dict, expected: dict) -> None:
    """Compare the state dicts of two optimizers."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            other = found["state"][index][key]
            if value is None:
                assert other is None
            else:
                assert other.shape == value.shape
                torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "first", "second"), [(3, 2, 3), (2, 3, 2), (3, 3, 1), (0, 2, 1), (1, 2, 3)]
)
def test_states_are_whole_and_go_on_with_other_ranks(tmp_path, kind, stage, first, second) -> None:
    model = tricky()
    optimizer = optimizer_of(kind, model)
    norms = steps(model, optimizer, 0, 1, 0, 3)
    middle = copy.deepcopy(optimizer.state_dict())
    norms += steps(model, optimizer, 0, 1, 3, 6)

    def begin(rank: int):
        model = start(stage)
        optimizer = optimizer_of(kind, model)
        found = steps(model, optimizer, rank, first, 0, 3)
        states, weights = optimizer.state_dict(), model.state_dict()
        if rank == 0:
            torch.save({"optimizer": states, "model": weights}, tmp_path / "run.pt")
        return found, states

    for found, states in run_ranks(first, begin):
        assert found == pytest.approx(norms[:3], rel=1e-5)
        assert_close(states, middle)

    def go_on(rank: int):
        stored = torch.load(tmp_path / "run.pt", weights_only=True)
        model = start(stage, seed=1)
        model.load_state_dict(stored["model"])
        optimizer = optimizer_of(kind, model)
        if rank % 2 == 0:  # the other ranks' are cut at the first step
            attach(optimizer)
        optimizer.load_state_dict(stored["optimizer"])
        found = steps(model, optimizer, rank, second, 3, 6)
        return found, optimizer.state_dict(), full_state_dict(model)

    for found, states, weights in run_ranks(second, go_on):
        assert found == pytest.approx(norms[3:], rel=1e-5)
        assert_close(states, optimizer.state_dict())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_local_states_and_states_on_rank_0() -> None:
    def fn(rank: int):
        model = start(3)
        optimizer = optimizer_of("adamw", model)
        steps(model, optimizer, rank, 2, 0, 2)
        whole = optimizer.state_dict()
        with state_dict_mode("local"):
            local = copy.deepcopy(optimizer.state_dict())
        one = full_optimizer_state_dict(optimizer, rank0_only=True, cpu=True)
        optimizer.load_state_dict(local)  # a rank's own shards are taken as they are
        again = optimizer.state_dict()
        shards = [
            optimizer.state[p]["exp_avg"].shape == local_shard(p).shape for p in optimizer.state
        ]
        return (
            whole,
            again,
            one,
            all(shards),
            [getattr(s["exp_avg"], "local", s["exp_avg"]).numel() for s in local["state"].values()],
        )

    first, second = run_ranks(2, fn)
    for whole, again, _, cut, numels in (first, second):
        assert_close(again, whole)
        assert cut
        assert sum(numels) < sum(s["exp_avg"].numel() for s in whole["state"].values())
    assert_close(first[2], first[0])
    assert second[2] == {}


def test_states_of_another_model_are_refused() -> None:
    def fn(rank: int):
        model = start(3)
        optimizer = optimizer_of("adamw", model)
        steps(model, optimizer, rank, 2, 0, 1)
        states = optimizer.state_dict()
        before = [state["exp_avg"].clone() for state in optimizer.state.values()]
        states["state"][1]["exp_avg"] = torch.ones(5, 2)
        with pytest.raises(ShardError, match=r"'exp_avg' of 'up.weight' has the shape \(5, 2\)"):
            optimizer.load_state_dict(states)
        return all(
            torch.equal(state["exp_avg"], old)
            for state, old in zip(optimizer.state.values(), before, strict=True)
        )

    assert all(run_ranks(2, fn))


def test_tied_weights_are_one_tensor_in_state_dicts(tmp_path) -> None:
    def fn(rank: int):
        model = start(3)
        model.again = model.up  # a module of two names
        dicts = [model.state_dict(), full_state_dict(model), model.state_dict(destination={})]
        torch.save(dicts[0], tmp_path / f"{rank}.pt")
        first = dicts[0]
        del first["embed.weight"]
        return (
            [
                (
                    each["head.weight"] is each.get("embed.weight"),
                    each["again.weight"] is each["up.weight"],
                )
                for each in dicts[:2]
            ],
            [torch.equal(each["head.weight"], dicts[1]["embed.weight"]) for each in dicts],
        )

    for same, equal in run_ranks(2, fn):
        assert same == [(False, True), (True, True)]
        assert all(equal)
    stored = torch.load(tmp_path / "0.pt", weights_only=True)
    assert stored["embed.weight"].data_ptr() == stored["head.weight"].data_ptr()


def test_states_of_a_model_that_has_been_freed_are_refused() -> None:
    def fn(rank: int) -> None:
        model = start(3)
        optimizer = optimizer_of("adamw", model)
        steps(model, optimizer, rank, 2, 0, 1)
        del model
        gc.collect()
        for ask in (optimizer.state_dict, lambda: full_optimizer_state_dict(optimizer)):
            with pytest.raises(ShardError, match="a shard of a model that has been freed"):
                ask()

    run_ranks(2, fn)
