"""Parameters that hold a shard: what they answer, what may be done to them, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchloom
from support.ranks import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import full_state_dict, local_shard


def net() -> nn.Sequential:
    """Two rows on two ranks, odd sizes, a vector: what broadcasts if nobody looks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 3, bias=False))


def sharded(stage: int) -> nn.Sequential:
    return torchloom.shard_model(net(), stage=stage, persistence_threshold=0)


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def facts(param: Tensor) -> tuple[object, ...]:
    sizes = (param.shape, param.size(), param.size(0), param.size(-1), param.dim(), param.ndim)
    counts = (param.numel(), param.nelement(), len(param), param.stride(), torch.numel(param))
    return (*sizes, *counts, param.is_contiguous())


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_answer_as_whole_weights(stage: int) -> None:
    expected = {name: facts(param) for name, param in net().named_parameters()}

    def fn(rank: int) -> None:
        model = sharded(stage)
        for name, param in model.named_parameters():
            for each in (param, param.detach(), param.data, param.detach().clone() * 2):
                assert facts(each) == expected[name]
            assert isinstance(param, nn.Parameter)
            assert type(local_shard(param)) is Tensor
            assert local_shard(param).numel() == -(-param.numel() // 2)
            assert local_shard(param).data_ptr() == param.data_ptr()

    run_ranks(2, fn)


def by_dim(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups for decay by dim, and rates by fan-in, as they are made of whole parameters."""
    groups = [
        {"params": [p], "weight_decay": 0.3 * (p.dim() >= 2), "lr": 0.1 / p.shape[-1]}
        for p in params
    ]
    return torch.optim.AdamW(groups, foreach=True)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_groups_made_after_sharding_are_those_of_the_whole_model(backend: str | None) -> None:
    def fn(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole, model = nn.parallel.DistributedDataParallel(net()), sharded(3)
        if backend:
            torchloom.compile(model, backend=backend)
        ours, theirs = by_dim([*model.parameters()]), by_dim([*whole.parameters()])
        for step in range(3):
            train(whole, rank, theirs, step)
            train(model, rank, ours, step)
        return full_state_dict(model), whole.module.state_dict()

    for found, expected in run_ranks(2, fn):
        torch.testing.assert_close(found, dict(expected))


REFUSED: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda p: p.norm(),
    "mean": lambda p: torch.mean(p),
    "row": lambda p: p[0],
    "transpose": lambda p: p.data.T,
    "vector": lambda p: parameters_to_vector([p.detach()]),
    "vector into parameters": lambda p: vector_to_parameters(torch.zeros(6), [p]),
    "pruning": lambda p: prune.l1_unstructured(p.model[0][3], "weight", 0.5),
    "parametrization": lambda p: parametrizations.spectral_norm(p.model[0][3]),
    "matmul": lambda p: p @ torch.ones(3),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "whole beside": lambda p: p - torch.zeros(3, 2),
    "foreach": lambda p: torch._foreach_lerp_([torch.zeros(3, 2)], [p.detach()], 0.1),
    "as many rows as ranks": lambda p: torch.zeros(2, 3).copy_(p.detach()),
    "gradient": lambda p: setattr(p, "grad", torch.zeros(3, 2)),
    "data": lambda p: setattr(p, "data", torch.zeros(3, 2)),
    "initialisation": lambda p: nn.init.normal_(p),
    "file": lambda p: torch.save([p], io.BytesIO()),
    "average": lambda p: dist.all_reduce(p.detach()),
    "coalesced": lambda p: dist._broadcast_coalesced(dist.group.WORLD, [p.detach()], 1 << 20, 0),
    "norm of the gradient": lambda p: p.grad.norm(),
    "whole beside the gradient": lambda p: p.grad.add_(torch.zeros(3, 2)),
    "broadcast of a state dict": lambda p: dist.broadcast(p.model[0].state_dict()["2.weight"], 0),
}


def test_what_takes_a_shard_for_the_weight_is_refused() -> None:
    def fn(rank: int) -> None:
        model = sharded(3)
        param = dict(model.named_parameters())["3.weight"]
        param.model = [nn.Sequential(*model)]  # another root finds the same parameters
        before = local_shard(param).clone()
        model(torch.ones(2, 3)).sum().backward()
        for name, act in REFUSED.items():
            with pytest.raises(ShardError, match=r"weight'") as caught:
                act(param)
            words = ("torchloom.shard.", "leave it out", "before the model is sharded")
            assert any(each in str(caught.value) for each in words), name
            assert torch.equal(local_shard(param), before), name

    run_ranks(2, fn)


def test_what_works_on_each_element_is_right_on_shards() -> None:
    def fn(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, whole = sharded(3), net()
        for each in (model, whole):
            each(torch.ones(2, 3)).square().sum().backward()
            params = [*each.parameters()]
            copies = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, kept in zip(params, copies, strict=True):
                    p.mul_(0.5)
                    p += 0.25 * kept
                    kept.lerp_(p, 0.1)
                    p.grad.clamp_(-0.1, 0.1)
                    p -= 0.1 * p.grad
                    p.grad = p.grad.clone().mul_(2)
                    assert p.grad.shape == p.shape
                    p.data.clamp_(-0.3, 0.3)
                    p.copy_(torch.where(p > 0, p, kept))
                torch._foreach_add_(params, copies, alpha=0.5)
            torch.nn.utils.clip_grad_value_(params, 0.15)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            torch.optim.SGD(params, lr=0.1, momentum=0.9).step()
        return full_state_dict(model), dict(whole.state_dict())

    for found, expected in run_ranks(2, fn):
        torch.testing.assert_close(found, expected)


def test_gradients_are_shards_however_they_are_asked_for() -> None:
    def fn(rank: int) -> None:
        model = sharded(3)
        params = dict(model.named_parameters())
        kept = params["3.weight"]

        def loss() -> Tensor:
            return model(torch.ones(2, 3)).square().sum()

        loss().backward(inputs=list(params.values()))
        of_backward = {name: local_shard(param.grad) for name, param in params.items()}
        grad, optimizer = kept.grad, torch.optim.SGD(params.values(), lr=0.0)
        optimizer.step()
        optimizer.zero_grad()
        out = model(torch.ones(2, 3))
        torch.autograd.backward([out], [2 * out.detach()], inputs=[kept, params["0.weight"]])
        for found in (
            grad,  # kept over a step
            kept.grad,
            torch.autograd.grad(loss(), kept)[0],
            torch.autograd.grad(loss(), list(params.values()))[list(params).index("3.weight")],
            torch.autograd.grad(loss(), params)["3.weight"],
        ):
            assert found.shape == (3, 2)
            torch.testing.assert_close(local_shard(found), of_backward["3.weight"])
            with pytest.raises(
                ShardError, match=r"norm is computed from the gradient of '3.weight'"
            ):
                found.norm()

    run_ranks(2, fn)


def averaged_model(model: nn.Module) -> tuple[Callable[[], None], Callable[[], nn.Module]]:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return lambda: ema.update_parameters(model), lambda: ema.module


def by_state_dict(model: nn.Module) -> tuple[Callable[[], None], Callable[[], nn.Module]]:
    """As timm, ultralytics and many programs do."""
    ema = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update() -> None:
        now = model.state_dict()
        for index, (name, value) in enumerate(ema.state_dict().items()):
            if index % 3 == 0:
                value.lerp_(now[name], 0.5)
            elif index % 3 == 1:
                value.copy_(0.5 * value + 0.5 * now[name].detach())
            else:
                value *= 0.5
                value.detach()[:] += 0.5 * now[name]

    return update, lambda: ema


def by_parameters(model: nn.Module) -> tuple[Callable[[], None], Callable[[], nn.Module]]:
    """A list of clones, as diffusers keeps it, put into a copy of the model at the end."""
    kept, ema = [p.clone().detach() for p in model.parameters()], copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        for value, param in zip(kept, model.parameters(), strict=True):
            value.sub_(0.5 * (value - param))

    def finish() -> nn.Module:
        for param, value in zip(ema.parameters(), kept, strict=True):
            param.data.copy_(value.to(param.device).data)
        return ema

    return update, finish


@pytest.mark.parametrize("average", [averaged_model, by_state_dict, by_parameters])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_averages_of_weights_made_after_sharding(average, stage: int) -> None:
    def fn(rank: int) -> list[tuple[dict[str, Tensor], Tensor]]:
        found = []
        whole = nn.parallel.DistributedDataParallel(net())
        for model, inner in ((sharded(stage), None), (whole, whole.module)):
            inner = inner or model
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            update, finish = average(inner)
            for step in range(3):
                train(model, rank, optimizer, step)
                update()
            ema = finish()
            result = ema(torch.ones(1, 3)).detach()
            found.append((full_state_dict(ema), result))
        return found

    for ours, theirs in run_ranks(2, fn):
        torch.testing.assert_close(ours, theirs)


def test_an_average_made_before_sharding_is_refused() -> None:
    def fn(rank: int) -> None:
        model = net()
        update, _ = averaged_model(model)
        torchloom.shard_model(model, stage=3, persistence_threshold=0)
        with pytest.raises(ShardError, match="after the model is sharded"):
            update()

    run_ranks(2, fn)


def test_state_dicts_are_saved_and_copied_as_plain_tensors() -> None:
    def fn(rank: int) -> None:
        model = sharded(3)
        state = model.state_dict()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        twin = copy.deepcopy(state)
        assert {type(value) for value in (*loaded.values(), *twin.values())} == {Tensor}
        twin["0.weight"].zero_()
        torch.testing.assert_close(dict(loaded), full_state_dict(model))
        with torch.no_grad():
            state["0.weight"][1].fill_(3.0)  # writes of a part reach the shard, too
        assert full_state_dict(model)["0.weight"][1].tolist() == [3.0] * 3
        assert torchloom.shard.unshard(model)[0].weight[1].tolist() == [3.0] * 3
        assert type(model[0].weight) is nn.Parameter

    run_ranks(2, fn)
