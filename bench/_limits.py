"""The budgets of a field: evenly spaced from the least that the planner needs to no recomputation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _fields import Field
from _group import ArmError, Group

_TIMEOUT_S = 900.0
_PLENTY_BYTES = 1 << 50
_LACKING = re.compile(r"PlanError: infeasible.*Raise compile\.memory_budget by at least ([\d,]+)")
_TRIES = 4


class Limits(NamedTuple):
    """Bytes of a rank, parameters and optimizer states included."""

    min_bytes: int
    """The least budget that the planner accepts."""
    max_bytes: int
    """Predicted peak when nothing is computed again."""


def find_limits(
    field: Field,
    *,
    batch: int,
    log_dir: Path,
    environment: Mapping[str, str],
    shape: Mapping[str, int] | None,
) -> Limits:
    """Ask the planner in fresh processes, which then leave.

    Raises:
        ArmError: the processes failed, or the planner refuses what it called the minimum.
    """
    group = Group(
        field.ours,
        batch=batch,
        world_size=field.world_size,
        log_dir=log_dir,
        environment=environment,
        shape=shape,
    )
    try:
        # Operators are measured here, so that all arms plan by the same times from the start.
        free = _plan(group, _PLENTY_BYTES, warmup=3, replan_step=1)
        least = search_least(
            lambda budget_bytes: _plan(group, budget_bytes)["min_peak_bytes"],
            free["min_peak_bytes"],
        )
        return Limits(least, free["peak_bytes"])
    finally:
        group.close()


def search_least(plan: Callable[[int], int], start: int) -> int:
    """Return the least budget that is accepted.

    Args:
        plan: plans for a budget and returns what it calls the minimum, passes behind the split
            left out; raises ArmError with the planner's refusal.
        start: what to try first.

    Raises:
        ArmError: something else failed, or the planner keeps refusing.
    """
    accepted: int | None = None
    refused: set[int] = set()
    budget = start
    for _ in range(_TRIES):
        try:
            least = plan(budget)
        except ArmError as error:
            lacking = lacking_bytes(str(error))
            if lacking is None:
                raise
            if accepted is not None:
                return accepted
            refused.add(budget)
            budget += lacking
            continue
        accepted = budget
        # After code was seen, a plan may fit where one of a new process is refused.
        if least >= budget or any(least <= each for each in refused):
            break
        budget = least
    if accepted is None:
        raise ArmError(f"the planner refuses {budget:,} bytes, after it had called them enough")
    return accepted


def budgets_between(limits: Limits, num: int) -> dict[int, int]:
    """Return `num` budgets in bytes by percent of the way from the least to no recomputation."""
    room = limits.max_bytes - limits.min_bytes
    steps = [index / (num - 1) for index in range(num)]
    return {round(100 * step): limits.min_bytes + round(step * room) for step in steps}


def lacking_bytes(message: str) -> int | None:
    """Return by how much a refused budget is too small, None when that is not what was refused."""
    found = _LACKING.search(message)
    return int(found.group(1).replace(",", "")) if found else None


def _plan(
    group: Group, budget_bytes: int, *, warmup: int = 1, replan_step: int = 0
) -> Mapping[str, Any]:
    own = {"memory_budget": budget_bytes, "replan_step": replan_step}
    command = {"do": "build", "warmup": warmup, "options": {**group.arm.options, **own}}
    said = group.ask(command, timeout_s=_TIMEOUT_S)[0]["said"]
    if not said["num_graphs"]:
        raise ArmError("the engine has no plan after its first step")
    return said
