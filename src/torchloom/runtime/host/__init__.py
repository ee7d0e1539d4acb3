"""Host memory as a second pool beside the device's: an arena, and copies in both directions.

arena     segments of host memory, cut into blocks, counted; accounts say whose they are
mover     issues copies, by threads or streams, and waits for them; one per device
"""

from __future__ import annotations

from torchloom.runtime.host.arena import Account, HostArena
from torchloom.runtime.host.mover import (
    Mover,
    MoveStats,
    Ticket,
    is_on_host,
    loaded,
    move_stats,
    mover_of,
)

__all__ = [
    "Account",
    "HostArena",
    "MoveStats",
    "Mover",
    "Ticket",
    "is_on_host",
    "loaded",
    "move_stats",
    "mover_of",
]
