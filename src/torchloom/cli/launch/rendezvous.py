"""The rendezvous of a run on one host: its agent is the only node, and serves the store on loopback."""

from __future__ import annotations

import uuid

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchloom.engine.loopback import ADDRESS, serve_store


class LocalRendezvous(RendezvousHandler):
    """Stands for torch's own handlers, whose stores listen on all interfaces."""

    def __init__(self) -> None:
        self._store = serve_store()
        self._id = uuid.uuid4().hex
        self._is_closed = False

    def get_backend(self) -> str:
        """Return its name."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Say that workers use this store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and where workers find it."""
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(dist.PrefixStore("agent", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Say whether no round is to come."""
        return self._is_closed

    def set_closed(self) -> None:
        """Let no round come."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many hosts want to join, which is none."""
        return 0

    def get_run_id(self) -> str:
        """Return what tells this run from others."""
        return self._id

    def shutdown(self) -> bool:
        """Do nothing: the store goes with this process."""
        return True
