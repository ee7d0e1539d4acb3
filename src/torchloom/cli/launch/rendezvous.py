"""The rendezvous of a run on one host: its agent is the only node and serves the store on loopback."""

from __future__ import annotations

import uuid

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchloom import envs
from torchloom.engine.loopback import ADDRESS, serve_store

_FAILED = "torchloom/first to fail"


def is_first_to_fail(rank: int) -> bool:
    """Note in the launcher's store that this rank fails, unless another has.

    Args:
        rank: of this process.

    Returns:
        Whether no other rank has failed before; also where no launcher serves a store.
    """
    place = envs.meeting(default_port=29500) if envs.launcher_has_store() else None
    if place is None:
        return True
    store = dist.TCPStore(place.host, place.port, is_master=False)
    return int(store.compare_set(f"{_FAILED} {place.attempt}", "", str(rank))) == rank


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

    def first_to_fail(self) -> int | None:
        """Return the rank that said so first, if any did."""
        key = f"{_FAILED} 0"  # there are no restarts
        return int(self._store.get(key)) if self._store.check([key]) else None

    def shutdown(self) -> bool:
        """Do nothing: the store ends with this process."""
        return True
