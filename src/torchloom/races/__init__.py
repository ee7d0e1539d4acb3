"""A proof that transfers which run beside compute never touch memory at the wrong time.

    graphs     the schedule of a lowered graph
    check      what a schedule does, and the rules: which accesses nothing orders
    gradients  whether a rewritten graph still reduces each gradient once

The proof is of the emitted order, for every timing of the transfers: it needs no device and runs
nothing.
"""

from __future__ import annotations

from torchloom.races.check import (
    Event,
    Free,
    Race,
    Start,
    TransferSchedule,
    Use,
    WaitFor,
    find_races,
)
from torchloom.races.gradients import Reductions, Unreduced, find_unreduced, reductions_of
from torchloom.races.graphs import GraphSchedule, schedule_of

__all__ = [
    "Event",
    "Free",
    "GraphSchedule",
    "Race",
    "Reductions",
    "Start",
    "TransferSchedule",
    "Unreduced",
    "Use",
    "WaitFor",
    "find_races",
    "find_unreduced",
    "reductions_of",
    "schedule_of",
]
