"""Make the planner of a step, with cost figures that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from torchloom.costs import (
    CostTable,
    Network,
    load_table,
    over_network,
    save_table,
    shared_table,
)
from torchloom.errors import PlanError
from torchloom.exchange import Agreement
from torchloom.log import get_logger
from torchloom.memory import Transit, WorkspaceTable
from torchloom.plan import Planner
from torchloom.runtime import refresh_bytes, transit_bytes
from torchloom.step.description import StepDescription
from torchloom.step.standing import Standing

logger = get_logger(__name__)

T = TypeVar("T")

TRANSIT = Transit(transit_bytes, refresh_bytes)
"""What the transports of this process hold besides results."""


def make_planner(
    standing: Standing,
    description: StepDescription,
    costs: CostTable,
    workspaces: WorkspaceTable,
    *,
    over_steps: bool,
) -> Planner | None:
    """Return a planner for the device memory that the budget leaves to forward and backward.

    Args:
        standing: memory used outside the graphs, and the budget for the whole step.
        description: of the step.
        costs: times of operators and links, equal on all ranks.
        workspaces: what operators allocate for themselves.
        over_steps: whether gathered weights stay over the micro-steps of a step.

    Returns:
        None when there is neither a budget nor a plan.

    Raises:
        PlanError: the budget does not even hold parameters and optimizer states.
    """
    budget_bytes, states = standing.budget_bytes, standing.states
    if budget_bytes is None and description.pinned is None:
        return None
    step_bytes = standing.step_bytes + (0 if states is None else states.largest_bytes)
    if budget_bytes is not None and budget_bytes <= standing.base_bytes + step_bytes:
        unit = ' (a number alone is bytes: write a unit, as "70GB")' if budget_bytes < 1e6 else ""
        raise PlanError(
            f"infeasible: compile.memory_budget is {budget_bytes:,} bytes{unit}, but parameters, "
            f"gradients and optimizer states of this rank alone hold {standing.base_bytes:,}, and "
            f"its optimizer's step adds {step_bytes:,}. Raise it above their sum, use more "
            "ranks, a higher ZeRO stage, or offload_opt_states"
        )
    return Planner(
        None if budget_bytes is None else budget_bytes - standing.beside_graphs_bytes,
        costs,
        workspaces,
        pinned=description.pinned,
        is_estimate=description.backend == "inductor",
        micro_steps=description.micro_steps if over_steps else 1,
        transit=TRANSIT,
        states=states,
        base_bytes=standing.beside_graphs_bytes,
        prefetch_is_bound=description.prefetch_is_bound,
    )


def costs_of(device: torch.device, network: Network) -> CostTable:
    """Return the costs of operators and links on this machine, the same on all ranks.

    Measured figures are rank 0's; the network is the one that the ranks use, as it was measured if it was.
    """
    return over_network(shared_table(load_table(device)), network)


def plan_again(planner: Planner, ranks: Agreement, device: torch.device) -> bool:
    """Measure the operators of the planned graphs and say whether that changes the plan.

    All ranks must call. Each operator runs alone, on random tensors; the slowest rank's figures
    count, as a step waits for its slowest rank. Figures that change no plan are kept on disk, where the
    next run reads them before its first plan; figures that change the plan are kept once it is compiled.

    Args:
        planner: measured and planned again.
        ranks: the exchange between all ranks.
        device: where operators are measured, and whose figures are kept.

    Returns:
        Whether the plan changes; the same on all ranks.
    """
    # A rank that took its graphs from a cache has none to plan; then no rank changes its plan.
    if ranks.least("graphs that were planned", planner.num_known) == 0:
        return False
    first = planner.costs
    _, is_measured = _tried(planner.measure, 0)
    planner.costs = replace(shared_table(planner.costs, "max"), network=first.network)
    changes, is_planned = _tried(planner.would_change, default=False)
    if not ranks.least("whether planning again worked", int(is_measured and is_planned)):
        planner.costs = first
        return False
    has_changed = ranks.most("whether the plan changes", int(changes)) > 0
    if not has_changed:
        keep_figures(planner, ranks, device)
    return has_changed


def keep_figures(planner: Planner, ranks: Agreement, device: torch.device) -> None:
    """Save the measured figures, so that the next run on this machine plans by them.

    Args:
        planner: whose figures are kept.
        ranks: rank 0 alone writes.
        device: the kind of device that the figures are for.
    """
    if ranks.rank != 0:
        return
    try:
        save_table(planner.costs, device)
    except OSError as error:
        logger.warning("measured times cannot be kept for the next run: %s", error)


def _tried(ask: Callable[[], T], default: T) -> tuple[T, bool]:
    """Return an answer and True, or the default and False: a failed second plan must not stop the run."""
    try:
        return ask(), True
    except Exception as error:  # noqa: BLE001  kernels run alone raise anything; ranks wait
        logger.warning(
            "the plan stays as it is, because planning again by measured times failed (%s: %s)",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return default, False
