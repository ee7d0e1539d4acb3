"""One Parameter in the models of two engines: right where it stays whole, refused where it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.pool import run_ranks
from support.runs import sharded
from torchloom.errors import ShardError

ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first, second = nn.Linear(7, 5), nn.Linear(7, 5, bias=False)
    second.weight = first.weight
    return nn.Sequential(first), nn.Sequential(second, nn.Tanh())


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    whole = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole[3 * rank : 3 * rank + 3]


def plain() -> list[torch.Tensor]:
    both = models()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1) for net in both]
    for step in range(6):
        net, optimizer = both[step % 2], optimizers[step % 2]
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for net in both for value in net.state_dict().values()]


@pytest.mark.parametrize("stages", [(0, 0), (0, 1), (1, 1)])
def test_what_stays_whole_is_trained_by_both(stages: tuple[int, int]) -> None:
    def fn(rank):
        both = models()
        engines = [
            sharded(net, stage, optimizer=ADAMW) for net, stage in zip(both, stages, strict=True)
        ]
        for step in range(6):
            engine = engines[step % 2]
            engine.backward(engine(batch(step, rank)).square().mean())
            engine.step()
        return [value.clone() for net in both for value in net.state_dict().values()]

    wanted = plain()
    for found in run_ranks(2, fn):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stages", [(3, 3), (2, 1), (3, 0), (1, 2), (0, 3)])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_cut_is_refused(stages: tuple[int, int], frozen: bool) -> None:
    def fn(rank):
        first, second = models()
        first[0].weight.requires_grad_(not frozen)
        engine = sharded(first, stages[0], optimizer=ADAMW)
        with pytest.raises(ShardError, match=r"^the parameter '0\.weight' is ") as caught:
            sharded(second, stages[1], optimizer=ADAMW)
        text = str(caught.value)
        assert "\n" not in text
        engine.backward(engine(batch(0, rank)).square().mean())
        engine.step()
        return text

    texts = run_ranks(2, fn)
    assert texts[0] == texts[1]


def test_whoever_let_go_does_not_count() -> None:
    def fn(rank):
        first, second = models()
        engine = sharded(first, 1, optimizer=ADAMW)
        del engine, first
        engine = sharded(second, 3, optimizer=ADAMW)
        engine.backward(engine(batch(0, rank)).square().mean())
        engine.step()

        first, second = models()
        engine = sharded(first, 3, optimizer=ADAMW)
        engine.unshard()
        sharded(second, 3, optimizer=ADAMW)

        first, second = models()
        engine = sharded(first, 3, optimizer=ADAMW)
        engine.destroy()
        del engine, first  # what is left is a piece
        with pytest.raises(ShardError, match="is a shard"):
            sharded(second, 0, optimizer=ADAMW)
        return True

    assert run_ranks(2, fn) == [True, True]


def test_a_module_of_another_engine_inside() -> None:
    def fn(rank):
        inner = nn.Sequential(nn.Linear(5, 5))
        sharded(inner, 0, optimizer=ADAMW)
        with pytest.raises(ShardError, match="another model"):
            sharded(nn.Sequential(inner, nn.Tanh()), 3)
        return True

    assert run_ranks(2, fn) == [True, True]
