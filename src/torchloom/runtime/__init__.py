"""Bodies of torchloom's operators: collectives behind one seam, copies between device and host.

Importing this package binds the bodies to the schemas of `torchloom.ops`. Communicators are
made with `get_communicator`; which implementation carries the bytes is decided there and
nowhere else.
"""

from __future__ import annotations

from torchloom._torch.untraced import leave_frames_alone
from torchloom.runtime import bodies as _bodies  # binds the operators
from torchloom.runtime.communicator import CommStats, Communicator
from torchloom.runtime.communicators import (
    for_model,
    get_communicator,
    lookup,
    use_shared_memory,
)
from torchloom.runtime.host import Account, Mover, MoveStats, move_stats, mover_of
from torchloom.runtime.lines import tell_step
from torchloom.runtime.transit import refresh_bytes, transit_bytes
from torchloom.runtime.weights import WeightStore, make_store

__all__ = [
    "Account",
    "CommStats",
    "Communicator",
    "MoveStats",
    "Mover",
    "WeightStore",
    "for_model",
    "get_communicator",
    "lookup",
    "make_store",
    "move_stats",
    "mover_of",
    "refresh_bytes",
    "tell_step",
    "transit_bytes",
    "use_shared_memory",
]

leave_frames_alone(_bodies)
_bodies.bind()
