"""What an engine knows that a plan needs: the bytes that are live whatever a step does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.errors import PlanError
from torchloom.plan import Planner
from torchloom.plan.costs import CostTable
from torchloom.runtime.host import is_on_host

_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1, "Lion": 1}
"""Tensors of a parameter's size that an optimizer keeps, before it has made them."""


def base_bytes(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    keeps_gradients: bool,
    keeps_states: bool = True,
) -> int:
    """Return the bytes that live before and after each forward and backward on this rank.

    Args:
        model: sharded, so that its parameters hold this rank's pieces.
        optimizer: over this rank's leaves; its states count although the first step makes them.
        keeps_gradients: whether gradients wait from one micro-step for the next.
        keeps_states: whether optimizer states live on the device, not in host memory.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    total = _distinct_bytes(tensor for tensor in tensors if not is_on_host(tensor))
    if keeps_gradients:
        total += trained_bytes(model)
    if optimizer is None:
        return total
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    masters = _distinct_bytes([*tensors, *leaves]) - _distinct_bytes(tensors)
    if not keeps_states:
        return total + masters
    made = [v for state in optimizer.state.values() for v in state.values() if _is_big(v)]
    states = _distinct_bytes(made)
    if not states:
        states = _num_states(optimizer) * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return total + masters + states


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a gradient of every trainable parameter, as this rank holds it."""
    return _distinct_bytes(param for param in model.parameters() if param.requires_grad)


def make_planner(budget_bytes: int | None, base: int, costs: CostTable) -> Planner | None:
    """Return a planner for what the budget leaves to forward and backward, None without a budget.

    Raises:
        PlanError: the budget does not even hold parameters and optimizer states.
    """
    if budget_bytes is None:
        return None
    if budget_bytes <= base:
        raise PlanError(
            f"infeasible: compile.memory_budget is {budget_bytes:,} bytes, but parameters, "
            f"gradients and optimizer states of this rank alone hold {base:,}. Give more, use more "
            "ranks, a higher ZeRO stage, or offload_opt_states"
        )
    return Planner(budget_bytes=budget_bytes - base, costs=costs)


def _num_states(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__
    if name == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return _STATES.get(name, 2)


def _is_big(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
