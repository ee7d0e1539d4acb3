"""What a step costs in memory and time, and which of its values to keep.

Planning works on captured graphs with fake tensors: it never runs the user's graph. The way from a
joint graph to a plan stands in `search`, from top to bottom.
"""

from __future__ import annotations

from torchloom.plan.model import Decision, GraphPlan, Plan
from torchloom.plan.planner import Planner, PlannerSnapshot
from torchloom.plan.problem import (
    KeptOnDevice,
    PlanCandidate,
    PlanningProblem,
    TransferSizes,
    TrialResult,
)
from torchloom.plan.states import HostStates

__all__ = [
    "Decision",
    "GraphPlan",
    "HostStates",
    "KeptOnDevice",
    "Plan",
    "PlanCandidate",
    "Planner",
    "PlannerSnapshot",
    "PlanningProblem",
    "TransferSizes",
    "TrialResult",
]
