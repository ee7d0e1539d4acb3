"""What a step costs in memory and time, and which of its values to keep.

Planning works on captured graphs with fake tensors: it never runs the user's graph. The life of a plan stands
in `planner`, the way from a joint graph to a new plan in `search`, each from top to bottom; `README.md` explains the
words.
"""

from __future__ import annotations

from torchloom.plan.model import Decision, GraphPlan, Plan
from torchloom.plan.planner import Planner, PlannerSnapshot
from torchloom.plan.problem import KeptOnDevice, PlanCandidate, PlanningProblem, TrialResult
from torchloom.plan.states import HostStates
from torchloom.plan.transfer_sizes import TransferSizes

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
