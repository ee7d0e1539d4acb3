"""The rendezvous of a run on one host: its agent is the only node and serves the store on loopback."""

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
    """Replaces torch's own handlers, whose stores listen on all interfaces."""

    def __init__(self) -> None:
        self._store = serve_store()
        self._id = uuid.uuid4().hex
        self._is_closed = False

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use this store too: yes."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and its address."""
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(dist.PrefixStore("agent", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return whether there will be no further round."""
        return self._is_closed

    def set_closed(self) -> None:
        """Allow no further round."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many hosts want to join: none."""
        return 0

    def get_run_id(self) -> str:
        """Return an id that is unique to this run."""
        return self._id

    def shutdown(self) -> bool:
        """Do nothing: the store ends with this process."""
        return True
