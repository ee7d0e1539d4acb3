"""The communicators of this process, by the handles under which graphs name them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from torchloom.errors import ShardError
from torchloom.runtime.base import GroupRef
from torchloom.runtime.communicator import Communicator
from torchloom.runtime.lines import open_lines
from torchloom.runtime.transports import connect

_COMMUNICATORS: dict[str, Communicator] = {}


def get_communicator(
    shard_group: dist.ProcessGroup,
    replicate_group: dist.ProcessGroup | None = None,
    *,
    symmetric_memory: bool = False,
) -> Communicator:
    """Return the communicator of these groups, made at the first call.

    All ranks must call in the same order: the handle counts calls, so that it is equal on all
    ranks although the groups of a mesh differ from rank to rank.

    Args:
        shard_group: ranks that share one copy of the weights.
        replicate_group: ranks that hold the same shard of different copies, or None.
        symmetric_memory: let ranks of one host communicate through memory that they share. Where
            that cannot be had the log says why, and the process group's own messages are used.
    """
    if replicate_group is not None and replicate_group.size() == 1:
        replicate_group = None
    for known in _COMMUNICATORS.values():
        is_same = known.symmetric_memory == symmetric_memory and known.model == 0
        if is_same and known.is_over(shard_group, replicate_group):
            return known
    num_replicas = 1 if replicate_group is None else replicate_group.size()
    open_lines()
    serial = sum(known.model == 0 for known in _COMMUNICATORS.values())
    handle = f"{shard_group.size()}x{num_replicas}#{serial}"
    shard = GroupRef(shard_group)
    replicate = None if replicate_group is None else GroupRef(replicate_group)
    _COMMUNICATORS[handle] = communicator = Communicator(
        handle,
        shard,
        replicate,
        connect(shard, f"{handle} shard", symmetric_memory=symmetric_memory),
        None
        if replicate is None
        else connect(replicate, f"{handle} replicate", symmetric_memory=symmetric_memory),
        symmetric_memory,
    )
    return communicator


def for_model(comm: Communicator, number: int) -> Communicator:
    """Return the communicator over the same groups for one of several models.

    What one model gathers, keeps and counts is not another's, and ranks that take the models in
    different order are told apart.

    Args:
        comm: of the first model.
        number: which model, equal on all ranks; 0 is the first.
    """
    if number == 0:
        return comm
    handle = f"{comm.handle}/model{number + 1}"
    known = _COMMUNICATORS.get(handle)
    if known is None:
        known = _COMMUNICATORS[handle] = replace(comm, handle=handle, model=number)
    return known


def use_shared_memory(comm: Communicator) -> None:
    """Let the ranks of a communicator talk through memory that they share from now on. All must call.

    Where that cannot be had, the log says why and all stays as it is. Other models over the same ranks
    keep what they have.
    """
    if comm.symmetric_memory:
        return
    comm.symmetric_memory = True
    comm.shard = connect(comm.shard_group, f"{comm.handle} shard shared", symmetric_memory=True)
    if comm.replicate_group is not None:
        name = f"{comm.handle} replicate shared"
        comm.replicate = connect(comm.replicate_group, name, symmetric_memory=True)


@contextmanager
def standing_in(comm: Communicator) -> Iterator[None]:
    """Let graphs that are traced in the block find this communicator under its handle, whoever had it before."""
    before = _COMMUNICATORS.get(comm.handle)
    _COMMUNICATORS[comm.handle] = comm
    try:
        yield
    finally:
        del _COMMUNICATORS[comm.handle]
        if before is not None:
            _COMMUNICATORS[comm.handle] = before


def lookup(handle: str) -> Communicator:
    """Return the communicator that a graph names.

    Raises:
        ShardError: no such communicator in this process.
    """
    try:
        return _COMMUNICATORS[handle]
    except KeyError:
        raise ShardError(
            f"a graph names communicator {handle!r}, this process has "
            f"{sorted(_COMMUNICATORS) or 'none'}: shard the model before running the graph"
        ) from None
