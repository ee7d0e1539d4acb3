"""The memory of a step in which a rank owns parameters: the optimizer's own code and the exchanges, on tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchloom.loop.alone import held_beside
from torchloom.loop.elementwise import step_without_hooks
from torchloom.loop.owner_exchanges import buckets
from torchloom.loop.owners import Unit
from torchloom.loop.ownership import Ownership, ownership_of
from torchloom.loop.together import members_of
from torchloom.memory import StepMemory, Twin, WorkspaceTable, step_memory
from torchloom.runtime import lookup
from torchloom.runtime.base import Pending
from torchloom.step.interfaces import OwnedMemory


def memory_of(optimizer: Any) -> OwnedMemory | None:
    """Return what finds out the memory of a loop's optimizers; None where shards alone are stepped, by one optimizer."""
    members = members_of(optimizer)
    owned = [owned_memory(each) for each in members]
    if len(members) < 2:
        return owned[0] if owned else None

    def of_all(workspaces: WorkspaceTable) -> StepMemory | None:
        """Return what all keep, and the most that one allocates: they step one after the other."""
        found = [
            own(workspaces) if own else step_memory(each, workspaces)
            for each, own in zip(members, owned, strict=True)
        ]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        most = max(known, key=lambda each: each.peak_bytes)
        states = {key: size for each in known for key, size in each.state_bytes.items()}
        return most._replace(state_bytes=states)

    return of_all


def owned_memory(optimizer: Any, *, of_any_rank: bool = False) -> OwnedMemory | None:
    """Return what finds out the memory of an optimizer's steps; None where ranks own no parameters of it.

    Args:
        optimizer: of torch's class, or what a framework wraps around one.
        of_any_rank: whether the most of all ranks is asked for, as in a simulation, where this one stands for all.
    """
    stepped = getattr(optimizer, "optimizer", optimizer)
    units = () if stepped is None else tuple(ownership_of(stepped).units.values())
    if not units:
        return None
    return functools.partial(_most_of_any if of_any_rank else _memory, stepped, units)


def _memory(
    optimizer: Optimizer, units: Sequence[Unit], workspaces: WorkspaceTable
) -> StepMemory | None:
    """Return what this rank allocates in a step, exchanges included, and keeps; None where that is not known."""

    def step_of(twin: Twin) -> Callable[[], None]:
        stepped, stand_ins = twin
        ownership = Ownership(stepped, _send_nothing)
        for unit in units:
            made = stand_ins[id(unit.param)]
            ownership.units[id(made)] = unit._replace(param=made)

        def step() -> None:
            held = held_beside(stepped)
            ownership.begin()
            step_without_hooks(stepped)
            ownership.bring_back()
            del held

        return step

    return step_memory(optimizer, workspaces, step_of)


def _most_of_any(
    optimizer: Optimizer, units: Sequence[Unit], workspaces: WorkspaceTable
) -> StepMemory | None:
    """Return the states of the rank that keeps most, and the most that any rank has beside them in a step."""
    rank, size = units[0].layout.rank, units[0].layout.world_size
    split = list(buckets(units))
    kinds = {  # ranks that own the same shapes, in the same buckets, need the same
        tuple(tuple(u.spec.shape for u in bucket if u.owner == other) for bucket in split): other
        for other in range(size)
    }
    found = []
    for other in kinds.values():
        as_it = [unit._replace(owner=(unit.owner - other + rank) % size) for unit in units]
        each = _memory(optimizer, as_it, workspaces)
        if each is None:
            return None
        found.append((sum(each.state_bytes.values()), each))
    kept, fullest = max(found, key=lambda pair: pair[0])
    most = max(keeps + each.peak_bytes for keeps, each in found)
    return fullest._replace(peak_bytes=most - kept)


def _send_nothing(
    handle: str, sent: Tensor, numels: Sequence[Sequence[int]], what: str, names: Sequence[str]
) -> tuple[Tensor, Pending]:
    """Allocate what an exchange does, and hold it as long; of tensors without data."""
    del what, names
    rank, held = lookup(handle).rank, [sent]
    return sent.new_empty(sum(row[rank] for row in numels)), Pending(held.clear)
