"""What process groups were built with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


def default_store() -> Any:
    """Return the key-value store that the default process group was built with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def own_store() -> Any:
    """Return the default group's store through a connection of its own, where it can have one.

    A call that blocks holds a connection, so that a thread needs another one.
    """
    store = default_store()
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):  # stores without a server have no connection
        return store


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group, shared by its ranks alone."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def group_timeout(group: Any) -> timedelta:
    """Return how long a collective of a process group may take."""
    return group._get_backend(torch.device("cpu")).options._timeout
