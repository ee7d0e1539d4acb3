"""What an engine knows that a plan needs: the bytes that are live whatever a step does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.engine.agreement import Agreement
from torchloom.errors import PlanError
from torchloom.log import get_logger
from torchloom.plan import HostStates, Plan, Planner
from torchloom.plan.costs import CostTable, Network, load_table, save_table, shared_table
from torchloom.plan.memory import distinct_bytes, optimizer_peak
from torchloom.runtime import transit_bytes
from torchloom.runtime.host import is_on_host

logger = get_logger(__name__)

_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1, "Lion": 1}
"""Tensors of a parameter's size that an optimizer keeps, before it has made them."""


_COUNTER_BYTES = 4
"""An optimizer's count of steps, for each parameter."""
_RESERVE_BYTES = 16 << 10
"""For losses, norms, scales and random states, which are not planned one by one."""


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
    total = _RESERVE_BYTES + distinct_bytes(tensor for tensor in tensors if not is_on_host(tensor))
    if keeps_gradients:
        total += trained_bytes(model)
    if optimizer is None:
        return total
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    masters = distinct_bytes([*tensors, *leaves]) - distinct_bytes(tensors)
    counters = _COUNTER_BYTES * len(leaves)
    if not keeps_states:
        return total + masters + counters
    states = distinct_bytes(v for state in optimizer.state.values() for v in state.values())
    if not states:
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        states = _num_states(optimizer) * size + counters
    return total + masters + states


def host_states(
    optimizer: Optimizer,
    agreement: Agreement,
    *,
    step_bytes: int,
    num_slots: int,
    with_states: bool,
    piece_bytes: int,
) -> HostStates:
    """Return what may wait on the host and then streams through the step. All ranks must call.

    Args:
        optimizer: over this rank's leaves; its states count although the first step makes them.
        agreement: of the ranks, which plan alike.
        step_bytes: device memory that is free in a step which keeps no states.
        num_slots: chunks of states that may be on the device at a time.
        with_states: whether states may wait, not pieces of parameters alone.
        piece_bytes: of the pieces that may wait.
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    num_states = _num_states(optimizer) if with_states else 0
    sizes = [num_states * leaf.numel() * leaf.element_size() for leaf in leaves]
    return HostStates(
        total_bytes=agreement.most("bytes of optimizer states", sum(sizes)),
        largest_bytes=agreement.most("bytes of one parameter's states", max(sizes, default=0)),
        num_params=agreement.most("trained elements", sum(leaf.numel() for leaf in leaves)),
        step_bytes=agreement.least("bytes free in the optimizer's step", step_bytes),
        num_slots=num_slots,
        piece_bytes=agreement.most("bytes of pieces", piece_bytes),
    )


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Return what an optimizer's step allocates for itself; 0 where that cannot be told."""
    if optimizer is None:
        return 0
    found = optimizer_peak(optimizer)
    if found is None:
        logger.info(
            "the memory of %s's step is not part of the plan: it reads values of tensors",
            type(optimizer).__name__,
        )
    return found or 0


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a gradient of every trainable parameter, as this rank holds it."""
    return distinct_bytes(param for param in model.parameters() if param.requires_grad)


def make_planner(
    budget_bytes: int | None,
    base: int,
    costs: CostTable,
    pinned: Plan | None = None,
    *,
    is_estimate: bool = False,
    step_bytes: int = 0,
    micro_steps: int = 1,
    states: HostStates | None = None,
) -> Planner | None:
    """Return a planner for what the budget leaves to forward and backward.

    Args:
        budget_bytes: what the user gave for everything.
        base: see `base_bytes`.
        costs: equal on all ranks.
        pinned: a plan to follow.
        is_estimate: see `Planner`.
        step_bytes: what the optimizer's step adds to the base.
        micro_steps: see `Planner`.
        states: see `Planner`.

    Returns:
        None when there is neither a budget nor a plan.

    Raises:
        PlanError: the budget does not even hold parameters and optimizer states.
    """
    if budget_bytes is None and pinned is None:
        return None
    if budget_bytes is not None and budget_bytes <= base + step_bytes:
        raise PlanError(
            f"infeasible: compile.memory_budget is {budget_bytes:,} bytes, but parameters, "
            f"gradients and optimizer states of this rank alone hold {base:,}, and its optimizer's "
            f"step adds {step_bytes:,}. Give more, use more ranks, a higher ZeRO stage, or "
            "offload_opt_states"
        )
    return Planner(
        None if budget_bytes is None else budget_bytes - base,
        costs,
        pinned=pinned,
        is_estimate=is_estimate,
        micro_steps=micro_steps,
        transit=transit_bytes,
        states=states,
    )


def load_pinned(path: str | None, world_size: int) -> Plan | None:
    """Read the plan that a config names.

    Raises:
        PlanError: it cannot be read, or was made for another number of ranks.
    """
    if path is None:
        return None
    plan = Plan.load(path)
    plan.check_world(world_size)
    return plan


def costs_of(device: torch.device, network: Network) -> CostTable:
    """Return what is known of this machine, the same on all ranks.

    Measured figures are rank 0's; the network is the one that the ranks use.
    """
    return replace(shared_table(load_table(device)), network=network)


def plan_again(planner: Planner, agreement: Agreement, device: torch.device) -> bool:
    """Measure the operators of the planned graphs and say whether that changes the plan.

    All ranks must call. Each operator runs alone, on random tensors; the slowest rank's figures
    count, as a step waits for its slowest rank. New figures are kept on disk, where the next run
    finds them before its first plan.

    Returns:
        The same on all ranks.
    """
    # A rank that took its graphs from a cache has none to plan: nobody changes anything then.
    if agreement.least("graphs that were planned", planner.num_known) == 0:
        return False
    planner.measure()
    network = planner.costs.network
    planner.costs = replace(shared_table(planner.costs, "max"), network=network)
    if agreement.rank == 0:
        try:
            save_table(planner.costs, device)
        except OSError as error:
            logger.warning("measured times cannot be kept for the next run: %s", error)
    changes = planner.would_change()
    return agreement.most("whether the plan changes", int(changes)) > 0


def _num_states(optimizer: Optimizer) -> int:
    name = type(optimizer).__name__
    if name == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return _STATES.get(name, 2)
