"""What a step costs in memory and time, and which of its values to keep.

Planning works on captured graphs with fake tensors: it never runs the user's graph.
"""

from __future__ import annotations

from torchloom.plan.model import Decision, GraphPlan, Plan
from torchloom.plan.planner import Planner, Task, infeasible

__all__ = ["Decision", "GraphPlan", "Plan", "Planner", "Task", "infeasible"]
