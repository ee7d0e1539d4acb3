"""Bodies of torchloom's operators: collectives behind one seam, copies to host memory and back.

Importing this package binds the bodies to the schemas of `torchloom.ops`. Communicators are
made with `get_communicator`; which implementation carries the bytes is decided there and
nowhere else.
"""

from __future__ import annotations

from torchloom.runtime import bodies as _bodies  # binds the operators
from torchloom.runtime.communicator import CommStats, Communicator, get_communicator, lookup
from torchloom.runtime.host import Mover, MoveStats, move_stats, mover_of

__all__ = [
    "CommStats",
    "Communicator",
    "MoveStats",
    "Mover",
    "get_communicator",
    "lookup",
    "move_stats",
    "mover_of",
]

_bodies.bind()
