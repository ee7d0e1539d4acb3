"""Collectives between processes of one host through memory that all of them map.

`connect` makes the transport, or says why it cannot be had here: then the process group's own
messages carry the bytes, as they do everywhere else.
"""

from __future__ import annotations

from torchloom.runtime.base import UnavailableError
from torchloom.runtime.transports.shm.collectives import SharedMemoryCollectives
from torchloom.runtime.transports.shm.connect import connect

__all__ = ["SharedMemoryCollectives", "UnavailableError", "connect"]
