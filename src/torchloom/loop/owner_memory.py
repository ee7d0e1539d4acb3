"""Memory and time of a step in which ranks own parameters: the optimizer's own code and the exchanges, on tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchloom.costs import CostTable, Stopwatch, collective_us
from torchloom.log import get_logger
from torchloom.loop.coupling import held_beside
from torchloom.loop.elementwise import may_step_by_parts, step_without_hooks
from torchloom.loop.optimizer_list import members_of
from torchloom.loop.owner_exchanges import buckets
from torchloom.loop.owners import Unit
from torchloom.loop.ownership import Ownership, ownership_of
from torchloom.loop.rounding import is_rounded, stand_in
from torchloom.memory import StepMemory, Twin, WorkspaceTable, step_memory
from torchloom.runtime import lookup
from torchloom.runtime.base import Pending
from torchloom.step.interfaces import OwnedMemory

logger = get_logger(__name__)


def memory_of(optimizer: Any) -> OwnedMemory | None:
    """Return what finds out the memory of a loop's optimizers; None where one optimizer steps shards alone, as they are."""
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
    """Return what finds out the memory of an optimizer's steps; None where it steps parts of parameters, as they are.

    Args:
        optimizer: of torch's class, or what a framework wraps around one.
        of_any_rank: whether the most of all ranks is asked for, as in a simulation, where this one stands for all.
    """
    stepped = getattr(optimizer, "optimizer", optimizer)
    units = () if stepped is None else tuple(ownership_of(stepped).units.values())
    if stepped is None or not (units or is_rounded(stepped)):
        return None
    return functools.partial(_most_of_any if of_any_rank and units else _memory, stepped, units)


def owned_us(optimizer: Any, table: CostTable) -> float:
    """Return what a step of owned parameters takes on the rank that has most to do, in microseconds; 0 where there are none.

    Operators take what the cost table says, one by one, as an optimizer's step is not compiled. By parts the exchanges of one
    bucket run beside the update of another one; else all wait for each other.

    Args:
        optimizer: of torch's class, on whose parameters nobody has data.
        table: of the hardware.
    """
    units = tuple(ownership_of(optimizer).units.values())
    split, num_ranks = list(buckets(units)), units[0].layout.world_size if units else 1
    exchange_us = update_us = 0.0
    for bucket in split:
        # An all-to-all sends from each rank what an all-gather of a part for one rank does.
        weight_bytes = sum(u.spec.numel * u.spec.dtype.itemsize for u in bucket) // num_ranks
        for sent in (2 * weight_bytes, weight_bytes):
            exchange_us += collective_us("all_gather", sent, num_ranks, table)
    for as_it in _as_each_rank(units):
        watch = Stopwatch(table)
        if _memory(optimizer, as_it, WorkspaceTable(measures=False), watch) is None:
            logger.warning(
                "%s's step cannot be tried on tensors without data: its time counts as AdamW's",
                type(optimizer).__name__,
            )
            num_stepped = sum(unit.spec.shard_numel for unit in units)
            update_us = 1e6 * num_stepped / table.device.adamw_params_per_s
            break
        update_us = max(update_us, watch.us)
    if not split or not may_step_by_parts(optimizer):
        return exchange_us + update_us
    return max(exchange_us, update_us) + min(exchange_us, update_us) / len(split)


def _memory(
    optimizer: Optimizer,
    units: Sequence[Unit],
    workspaces: WorkspaceTable,
    watch: Stopwatch | None = None,
) -> StepMemory | None:
    """Return what this rank allocates in a step, exchanges included, and keeps; None where that is not known.

    Args:
        optimizer: over all parameters.
        units: what ranks own of them.
        workspaces: what operators allocate for themselves.
        watch: is given the time of a step of nothing else.
    """

    def step_of(twin: Twin) -> Callable[[], None]:
        stepped, stand_ins = twin
        ownership = Ownership(stepped, _send_nothing)
        for group in optimizer.param_groups:
            for param in group["params"]:
                stand_in(param, stand_ins[id(param)])
        for unit in units:
            made = stand_ins[id(unit.param)]
            ownership.units[id(made)] = unit._replace(param=made)

        if watch is not None:
            for made in stand_ins.values():
                if id(made) not in ownership.units:
                    made.grad = None

        def step() -> None:
            held = held_beside(stepped)
            with _timed(watch):
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
    found = []
    for as_it in _as_each_rank(units):
        each = _memory(optimizer, as_it, workspaces)
        if each is None:
            return None
        found.append((sum(each.state_bytes.values()), each))
    kept, fullest = max(found, key=lambda pair: pair[0])
    most = max(keeps + each.peak_bytes for keeps, each in found)
    return fullest._replace(peak_bytes=most - kept)


def _timed(watch: Stopwatch | None) -> AbstractContextManager[object]:
    """Return a block whose operators are timed anew: the last step counts, when there are states."""
    if watch is None:
        return nullcontext()
    watch.us = 0.0
    return watch


def _as_each_rank(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Yield the units as if this rank were each other one; ranks that own the same shapes, in the same buckets, once."""
    if not units:
        return
    rank, size = units[0].layout.rank, units[0].layout.world_size
    split = list(buckets(units))
    kinds = {
        tuple(tuple(u.spec.shape for u in bucket if u.owner == other) for bucket in split): other
        for other in range(size)
    }
    for other in kinds.values():
        yield [unit._replace(owner=(unit.owner - other + rank) % size) for unit in units]


def _send_nothing(
    handle: str, sent: Tensor, numels: Sequence[Sequence[int]], what: str, names: Sequence[str]
) -> tuple[Tensor, Pending]:
    """Allocate what an exchange does, and hold it as long; of tensors without data."""
    del what, names
    rank, held = lookup(handle).rank, [sent]
    return sent.new_empty(sum(row[rank] for row in numels)), Pending(held.clear)
