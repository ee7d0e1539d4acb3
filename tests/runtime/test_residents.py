"""Weights that stay gathered: when they are gathered, and when they are not."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from torchloom.runtime.residents import Residents


class Gathers:
    """Fills both halves with a shard and its double, and remembers what was gathered together."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, shards, fulls, names) -> None:
        self.calls.append([shard.numel() for shard in shards])
        for shard, full in zip(shards, fulls, strict=True):
            full.copy_(torch.cat([shard, 2 * shard]))


def make(bucket_bytes: int = 1 << 20) -> tuple[Residents, Gathers]:
    gathers = Gathers()
    residents = Residents(gathers, 2)
    residents.bucket_bytes = bucket_bytes
    return residents, gathers


def param(numel: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, numel + 1))


def test_a_weight_is_gathered_once_until_it_is_written():
    residents, gathers = make()
    weight = param(3)
    for _ in range(3):
        full = residents.get(weight, torch.float32, "w")
    assert torch.equal(full, torch.tensor([1.0, 2, 3, 2, 4, 6]))
    assert len(gathers.calls) == 1
    with torch.no_grad():
        weight.add_(1)
    assert residents.get(weight, torch.float32, "w")[0] == 2
    assert len(gathers.calls) == 2


def step(optimizer: type[torch.optim.Optimizer], **options):
    def write(weight: nn.Parameter) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.5, **options).step()

    return write


def through_detach(weight: nn.Parameter) -> None:
    weight.detach().copy_(torch.zeros_like(weight))


def in_other_memory(weight: nn.Parameter) -> None:
    weight.data = torch.full_like(weight, 7.0)


@pytest.mark.parametrize(
    "write",
    [
        step(torch.optim.SGD, foreach=True),
        step(torch.optim.AdamW, foreach=True),
        step(torch.optim.AdamW, foreach=False),
        *(through_detach, in_other_memory),
    ],
)
def test_writes_that_torch_counts_are_seen(write):
    residents, _ = make()
    weight = param(3)
    residents.get(weight, torch.float32, "w")
    write(weight)
    full = residents.get(weight, torch.float32, "w")
    assert torch.equal(full, torch.cat([weight, 2 * weight]))


def through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(3)


@pytest.mark.parametrize("write", [through_data, step(torch.optim.AdamW, fused=True)])
def test_a_write_that_torch_does_not_count_needs_a_word(write):
    residents, gathers = make()
    weight = param(3)
    residents.get(weight, torch.float32, "w")
    write(weight)
    residents.invalidate("other")
    residents.get(weight, torch.float32, "w")
    assert len(gathers.calls) == 1
    residents.invalidate("w")
    assert torch.equal(residents.get(weight, torch.float32, "w")[:3], weight)


def test_weights_out_of_date_are_gathered_together_up_to_the_bucket():
    residents, gathers = make(bucket_bytes=2 * 4 * 7)
    weights = [param(numel) for numel in (3, 4, 5, 1)]
    for _ in range(2):
        for index, weight in enumerate(weights):
            residents.get(weight, torch.float32, str(index))
        residents.invalidate()
    assert gathers.calls == [[3], [4], [5], [1], [3, 4], [5, 1]]


def test_types_and_models_are_told_apart():
    residents, gathers = make()
    one, other = param(3), param(3)
    residents.get(one, torch.float32, "w")
    half = residents.get(one, torch.bfloat16, "w")
    residents.get(other, torch.float32, "w")
    assert half.dtype == torch.bfloat16
    assert len(gathers.calls) == 3
    assert residents.num_bytes == 6 * (4 + 2 + 4)
    del one, half
    gc.collect()
    residents.get(param(5), torch.float32, "v")
    assert residents.num_bytes == 6 * 4 + 10 * 4  # those of the model that is gone are freed
    residents.clear()
    assert residents.num_bytes == 0
