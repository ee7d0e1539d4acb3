"""An optimizer of somebody else's, whose class nobody has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Base(Optimizer):
    """An optimizer of somebody else's, with the update of one parameter to fill in."""

    def __init__(self, params: Any, lr: float = 1e-2, **rest: Any) -> None:
        super().__init__(params, {"lr": lr, **rest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    assert param.shape == param.grad.shape
                    self.update(param, group, self.state[param])

    def update(self, param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError
