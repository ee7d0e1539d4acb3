"""Host memory as a second pool beside the device's: an arena, and copies in both directions.

accounts  whose copies and memory these are: the engines of one device share the rest
arena     segments of host memory, cut into blocks, counted
mover     issues copies and waits for them; one per device
threads   copies on a CPU: a background thread per direction
streams   copies of a CUDA device: a stream per direction
"""

from __future__ import annotations

from torchloom.runtime.host.accounts import Account
from torchloom.runtime.host.arena import HostArena
from torchloom.runtime.host.mover import (
    Mover,
    MoveStats,
    Ticket,
    is_on_host,
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
    "move_stats",
    "mover_of",
]
