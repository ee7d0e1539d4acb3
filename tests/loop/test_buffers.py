"""Buffers in loops of one's own are those of rank 0, as under DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchloom
from support.pool import run_ranks


class Averaging(nn.Module):
    """Reads a statistic that its forward has written, beside running statistics."""

    def __init__(self, is_wrapped: bool = False) -> None:
        super().__init__()
        self.is_wrapped = is_wrapped
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_wrapped:
            self.cache = torch.ones(1 + x.shape[0] % 3)
        found = self.down(self.norm(self.up(x - self.level.mean())).relu())
        if self.training:
            self.level.lerp_(x.detach().mean().expand(3), 0.5)
        return found


def trained(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Train; return what an evaluation finds, and the buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(8 + rank, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(4, 16))
    return [found, *(value.clone() for name, value in model.named_buffers() if "cache" not in name)]


def test_buffers_are_as_under_ddp() -> None:
    def fn(rank: int):
        expected = trained(DistributedDataParallel(Averaging(is_wrapped=True)), rank)
        found = []
        for stage, given, compiled in (
            (0, None, False),
            (1, None, False),
            (0, None, True),
            (3, True, True),
            (3, None, False),
            (0, False, False),
        ):
            model = Averaging()
            torchloom.shard_model(model, stage, persistence_threshold=0, broadcast_buffers=given)
            if compiled:
                torchloom.compile(model, backend="aot_eager")
            values = trained(model, rank)
            pairs = zip(expected, values, strict=True)
            found.append(all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs))
        return found

    first, second = run_ranks(2, fn)
    assert first[:4] == second[:4] == [True] * 4
    assert second[4:] == [False, False]
