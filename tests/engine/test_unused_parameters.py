"""Parameters that a step leaves out: an output beside the loss, and an expert that only some ranks need."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torchloom
from support.pool import run_ranks
from torchloom.shard import full_state_dict


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def trained(net: nn.Module, ranks: list[int], used: list[int], *, runs_all: bool) -> nn.Module:
    """Train on the mean loss of ranks, each of which needs the head that `used` names for it."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(2):
        for rank in ranks:
            outs = net(torch.full((2, 4), 1.0 + rank + step))
            loss = outs[used[rank] if step else 0].square().mean() / len(ranks)
            if runs_all:
                loss = loss + 0 * sum(out.sum() for out in outs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def test_outputs_beside_the_loss_and_experts_of_some_ranks() -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        start = Heads()
        for used, runs_all in (([1, 1], False), ([0, 1], True)):
            for backend in ("", "aot_eager"):
                plain = copy.deepcopy(start)
                if backend:
                    plain.compile(
                        backend=backend
                    )  # gives zeros, not None, to heads beside the loss
                trained(plain, [0, 1], used, runs_all=runs_all)
                for stage in (1, 3):
                    net = copy.deepcopy(start)
                    torchloom.shard_model(net, stage=stage, persistence_threshold=0)
                    if backend:
                        torchloom.compile(net, backend=backend)
                    trained(net, [rank], used, runs_all=runs_all)
                    for name, value in full_state_dict(net).items():
                        torch.testing.assert_close(
                            value, plain.state_dict()[name], msg=f"{used} {backend} {stage}"
                        )

    run_ranks(2, fn)
