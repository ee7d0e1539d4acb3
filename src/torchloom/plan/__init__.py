"""What a step costs in memory and time, and which of its values to keep.

Planning works on captured graphs with fake tensors: it never runs the user's graph.
"""

from __future__ import annotations

from torchloom.plan.model import Decision, GraphPlan, Plan
from torchloom.plan.planner import Planner
from torchloom.plan.states import HostStates
from torchloom.plan.problem import Beside, Flight, Outcome, Task, Trial

__all__ = [
    "Beside",
    "Decision",
    "Flight",
    "GraphPlan",
    "HostStates",
    "Outcome",
    "Plan",
    "Planner",
    "Task",
    "Trial",
]
