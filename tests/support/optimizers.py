"""Optimizers of somebody else's, whose classes nobody has read."""

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


class Shampoo(Base):
    """Gupta et al., arXiv 1802.09568: a matrix of statistics of each dim, and its inverse root."""

    def update(self, param, group, state):
        grad = param.grad
        for dim, size in enumerate(param.shape):
            found = state.setdefault(f"statistics {dim}", 0.1 * torch.eye(size))
            rows = param.grad.movedim(dim, 0).reshape(size, -1)
            found += rows @ rows.T
            values, vectors = torch.linalg.eigh(found)
            root = vectors @ values.pow(-1 / (2 * param.dim())).diag() @ vectors.T
            grad = torch.tensordot(root, grad.movedim(dim, 0), 1).movedim(0, dim)
        param.add_(grad, alpha=-group["lr"])


class Soap(Base):
    """As Vyas et al., arXiv 2409.11321: Adam in the eigenbasis of a gradient's statistics, kept up by QR."""

    def update(self, param, group, state):
        if param.dim() != 2:
            param.add_(param.grad.sign(), alpha=-group["lr"])
            return
        grad = param.grad
        for name, rows in (("left", grad), ("right", grad.T)):
            statistics = state.setdefault(name, torch.eye(len(rows)))
            statistics.lerp_(rows @ rows.T, 0.05)
            basis = state.setdefault(f"basis {name}", torch.eye(len(rows)))
            basis.copy_(torch.linalg.qr(statistics @ basis)[0])
        turned = state["basis left"].T @ grad @ state["basis right"]
        first = state.setdefault("first", torch.zeros_like(param)).lerp_(turned, 0.1)
        second = state.setdefault("second", torch.zeros_like(param)).lerp_(turned.square(), 0.05)
        update = first / (second.sqrt() + 1e-6)
        param.add_(state["basis left"] @ update @ state["basis right"].T, alpha=-group["lr"])


class Lamb(Base):
    """As You et al., arXiv 1904.00962: a step as long as a share of the weight."""

    def update(self, param, group, state):
        average = state.setdefault("average", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        trust = param.norm() / (average.norm() + 1e-6)
        param.add_(average, alpha=-group["lr"] * float(trust.clamp(0.1, 10)))
