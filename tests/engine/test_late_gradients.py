"""Parameters whose first gradient comes later than others' train as with plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.pool import run_ranks
from support.runs import sharded


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.first(x) + (self.second(x) if both else 0)).square().mean()


OPTIMIZERS = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "AdamW": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
}
USED = (False, True, False, True)
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def plain(kind: str, params: dict[str, float]) -> list[torch.Tensor]:
    model = Late()
    optimizer = getattr(torch.optim, kind)(model.parameters(), foreach=False, **params)
    for both in USED:
        model(X, both).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.parametrize(("stage", "offload"), [(0, {}), (1, {}), (3, {}), (1, {"device": "cpu"})])
def test_first_gradients_that_come_late(stage: int, offload: dict[str, str]) -> None:
    def run(rank, kind, params):
        model = Late()
        section = {"type": kind, "params": params}
        engine = sharded(model, stage, optimizer=section, zero={"offload_optimizer": offload})
        for both in USED:
            engine.backward(engine(X[3 * rank : 3 * rank + 3], both))
            engine.step()
        return [value.clone() for value in model.state_dict().values()]

    def fn(rank):
        return {name: run(rank, *kind) for name, kind in OPTIMIZERS.items()}

    for found in run_ranks(2, fn):
        for name, kind in OPTIMIZERS.items():
            for one, other in zip(found[name], plain(*kind), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
