"""Weights that are looked up at their modules between steps: nothing that is done to them is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.errors import ShardError
from torchloom.shard import full_state_dict, gathered, local_shard, unshard


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def clamp(model: Any) -> None:
    with torch.no_grad():
        model[1].weight.clamp_(-0.1, 0.1)


def set_rows(model: Any) -> None:
    model[0].weight.data[:5] = 0


def assign(model: Any) -> None:
    model[1].weight.data = torch.full((8, 8), 0.5)


def reset(model: Any) -> None:
    torch.manual_seed(3)
    model[3].reset_parameters()


def add(model: Any) -> None:
    with torch.no_grad():
        torch.add(model[1].weight, 1.0, out=model[1].weight)


def view(model: Any) -> None:
    with torch.no_grad():
        model[1].weight[:2].zero_()


def hook(model: Any) -> None:
    model[1].weight.register_hook(lambda grad: 2 * grad)


WAYS = [clamp, set_rows, assign, add, view, hook]


def run_it(model: nn.Module, way: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    way(model)
    loss = model(torch.arange(12)).square().sum()
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.step()
    return {name: value.clone() for name, value in full_state_dict(model, cpu=True).items()}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_weights_are_written_and_shards_refuse(way, compiled) -> None:
    def run(rank: int) -> Any:
        found = {}
        for stage in (0, 1, 3):
            torch._dynamo.reset()
            model = made()
            torchloom.shard_model(model, stage=stage, persistence_threshold=0)
            if compiled:
                torchloom.compile(model, backend="aot_eager")
            model(torch.arange(12))
            try:
                found[stage] = run_it(model, way)
            except ShardError as error:
                found[stage] = str(error)
        return found

    expected = made()
    way(expected)
    expected(torch.arange(12)).square().sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.01).step()
    for found in run_ranks(2, run):
        assert "outside of forward" in found[3]
        for stage in (0, 1):
            if isinstance(found[stage], str):  # a view of a copy cannot write into the parameter
                assert way is view, found[stage]
                continue
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(found[stage][name], value, rtol=1e-5, atol=1e-6)


def test_reading_is_as_ever() -> None:
    def run(rank: int) -> Any:
        model = made()
        torchloom.shard_model(model, stage=3, persistence_threshold=0)
        weight, whole = model[1].weight, full_state_dict(model)["1.weight"]
        assert torch.equal(weight, whole)
        assert weight.shape == (8, 8)
        assert weight.requires_grad
        assert weight.data.norm() == whole.norm()
        assert weight.detach().numpy().sum() == pytest.approx(whole.numpy().sum())
        assert type(weight * 2) is torch.Tensor
        assert type(weight.clone()) is torch.Tensor
        (weight * 2).sum().backward()  # reaches the shard, averaged
        grad = local_shard(dict(model.named_parameters())["1.weight"].grad)
        with pytest.raises(ShardError, match="its gradient"):
            _ = weight.grad
        with gathered(model, ["1.weight"], modifier_rank=0), torch.no_grad():
            model[1].weight.fill_(3.0)
        assert (model[1].weight == 3.0).all()
        return grad.sum().item(), model[1](torch.ones(2, 8)).sum().item()

    results = run_ranks(2, run)
    assert results[0][0] > 0
    assert results[0][1] == results[1][1]


def test_hooks_from_before_are_refused_where_the_parameter_is_cut() -> None:
    def run(rank: int) -> Any:
        model = made()
        model[0].weight.register_hook(lambda grad: grad)
        with pytest.raises(ShardError, match="has a hook on its gradient"):
            torchloom.shard_model(model, stage=3, persistence_threshold=0)
        torchloom.shard_model(model, stage=1, persistence_threshold=0)

    run_ranks(2, run)


def test_hooks_of_accumulating_nodes_are_never_lost_without_a_word() -> None:
    def run(rank: int) -> Any:
        seen = []
        model = made()
        for register in ("register_hook", "register_prehook"):
            node = model[1].bias.expand_as(model[1].bias).grad_fn.next_functions[0][0]
            handle = getattr(node, register)(lambda *_: None)
            with pytest.raises(ShardError, match=r"'1.bias' has a hook on the node that accum"):
                torchloom.shard_model(model, stage=3, persistence_threshold=0)
            handle.remove()
        torchloom.shard_model(model, stage=3, persistence_threshold=0)
        bias = dict(model.named_parameters())["1.bias"]
        bias.register_hook(lambda grad: seen.append("tensor"))
        bias.register_post_accumulate_grad_hook(lambda param: seen.append("post"))
        with gathered(model):
            pass
        node = bias.clone().grad_fn.next_functions[0][0]
        handle = node.register_hook(lambda *_: seen.append("node"))
        for lose in (lambda: gathered(model).__enter__(), lambda: unshard(model)):
            with pytest.raises(ShardError, match=r"'1.bias' has a hook on the node that accumulat"):
                lose()
        model(torch.arange(12)).square().sum().backward()
        assert seen == ["tensor", "post", "node"] or seen == ["tensor", "node", "post"]
        handle.remove()
        unshard(model)

    run_ranks(2, run)


def test_hooks_of_whole_parameters_stay_where_the_parameter_does() -> None:
    def run(rank: int) -> Any:
        seen = []
        for dtype in (torch.float32, torch.bfloat16):
            model = made().to(dtype)
            node = torch.autograd.graph.get_gradient_edge(model[1].bias).node
            node.register_hook(lambda *_: seen.append("node"))
            if dtype == torch.bfloat16:  # kept in fp32
                with pytest.raises(ShardError, match=r"'1.bias' has a hook on the node that accum"):
                    torchloom.shard_model(model, stage=1, persistence_threshold=0)
            else:
                torchloom.shard_model(model, stage=1, persistence_threshold=0)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    model(torch.arange(12)).square().sum().backward()
                    optimizer.step()
                assert seen == ["node", "node"]
        with torch.device("meta"):
            model = made()
        model[1].bias.register_hook(lambda grad: grad)
        with pytest.raises(ShardError, match="be lost with its meta device"):
            torchloom.shard_model(model, stage=1)

    run_ranks(2, run)


def test_clones_that_keep_their_graph_stand_in_no_way() -> None:
    def steps(stage: int | None) -> list[Any]:
        model = made()
        before = [each.clone() for each in model.parameters()]
        if stage is not None:
            torchloom.shard_model(model, stage=stage, persistence_threshold=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.arange(12)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            during = [each.clone() for each in model.parameters()]
        if stage is not None:
            unshard(model)
        model(torch.arange(12)).square().sum().backward()
        optimizer.step()
        assert all(each.requires_grad for each in during)
        return [each.tolist() for each in (*before, *model.parameters())]

    expected = steps(None)
    for found in run_ranks(2, lambda rank: [steps(stage) for stage in (1, 2, 3)]):
        for stage in found:
            for each, value in zip(stage, expected, strict=True):
                torch.testing.assert_close(torch.tensor(each), torch.tensor(value))
