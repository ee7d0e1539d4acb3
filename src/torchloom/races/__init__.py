"""A proof that transfers which run beside compute never touch memory at the wrong time.

    events    what a schedule does, in the order in which it is issued
    graphs    the schedule of a lowered graph
    check     the rules: which accesses nothing orders

The proof is of the emitted order, for every timing of the transfers: it needs no device and runs
nothing.
"""

from __future__ import annotations

from torchloom.races.check import Race, find_races
from torchloom.races.events import ENGINES, Event, Free, Schedule, Start, Use, Wait
from torchloom.races.graphs import schedule_of

__all__ = [
    "ENGINES",
    "Event",
    "Free",
    "Race",
    "Schedule",
    "Start",
    "Use",
    "Wait",
    "find_races",
    "schedule_of",
]
