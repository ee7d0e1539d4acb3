"""Stream optimizer states, and shards of parameters, from host memory through the optimizer's step.

At rest the tensors in `optimizer.state`, and the data of offloaded shards, are host memory. In a
step chunks of parameters take turns: their tensors are loaded into device memory, the
optimizer steps just them, and what it wrote goes back. An optimizer that is known to step some
parameters, and then others, as it steps all of them at once, so gives the same result to the bit. Any
other one is stepped once, with all states on the device.

    one slot     load 0, step 0, store 0 | load 1, step 1, store 1 | ...
    two slots    load 1 runs beside step 0, and beside store 0 if the link carries both directions

A slot is free again when the store that read it is done.

Parameters that ranks own (`loop.ownership`) travel to their owners and back inside of the step of a chunk, so chunks hold
the same parameters on all ranks: each is filled until what one of the ranks keeps of it reaches the size of a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.errors import EngineError
from torchloom.loop.coupling import counts_parts, numbers_key
from torchloom.loop.elementwise import has_step_hooks, may_step_by_parts
from torchloom.loop.owners import Unit
from torchloom.loop.ownership import ownership_of
from torchloom.loop.rounding import is_rounded, only, wide_bytes
from torchloom.plan.states import CHUNK_BYTES, HostStates
from torchloom.runtime import lookup
from torchloom.runtime.host import Mover, Ticket

_ALIGN = 64
_Place = tuple[Tensor, tuple[Any, ...]]
"""A parameter and the keys that lead to one of its states, as states may be in lists and dicts; none: the parameter's data."""


@dataclass
class _Chunk:
    """Parameters that step together, and where their tensors wait."""

    leaves: list[nn.Parameter] = field(default_factory=list)
    hosts: dict[_Place, Tensor] = field(default_factory=dict)
    """Host tensors that are loaded."""
    stores: dict[_Place, Tensor] = field(default_factory=dict)
    """Those that are written on the way back, which may be new ones."""
    copy: Ticket | None = None
    """Under way."""


@dataclass
class StateStream:
    """Steps an optimizer whose states live on the host.

    Args:
        optimizer: any of torch's protocol.
        mover: moves between its device and the host.
        num_slots: chunks that may be on the device at a time.
        chunk_bytes: size of a chunk, see `plan.states.CHUNK_BYTES`.
        states: whether states live on the host; otherwise only offloaded parameters stream.
    """

    optimizer: Optimizer
    mover: Mover
    num_slots: int = 2
    chunk_bytes: int = CHUNK_BYTES
    states: bool = True
    resident_bytes: int = 0
    """States that stay on the device, in bytes: of each parameter in turn that still fits."""

    def __post_init__(self) -> None:
        self._at_once = not may_step_by_parts(self.optimizer)

    def step(self) -> None:
        """Step all parameters that have a gradient. All ranks must call where they own parameters.

        Raises:
            EngineError: the optimizer got step hooks, which would run once per chunk; or it was declared to step by
                parts, and keeps numbers for all parameters.
        """
        self._check_hooks()
        leaves = [leaf for leaf in self._leaves() if leaf.grad is not None]
        resident = self._residents(leaves)
        chunks = self._chunks(leaves, resident)
        num_loaded, numbers = 0, set[int]()
        for index, chunk in enumerate(chunks):
            # Load this chunk, and those after it for which there is room.
            for ahead in range(num_loaded, min(index + self.num_slots, len(chunks))):
                if ahead >= self.num_slots:
                    self._end_store(chunks[ahead - self.num_slots])
                self._load(chunks[ahead])
                num_loaded += 1
            _end(chunk)
            self._step_chunk(chunk)
            numbers.add(numbers_key(self.optimizer))
            self._store(chunk, resident)
        for chunk in chunks[-self.num_slots :]:
            self._end_store(chunk)
        if len(numbers) > 1:
            raise counts_parts(self.optimizer)

    def _step_chunk(self, chunk: _Chunk) -> None:
        with only(self.optimizer, chunk.leaves):
            try:
                self.optimizer.step()
            finally:  # a step that raised may have left parameters with their owners
                ownership_of(self.optimizer).restore()

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Choose the size of chunks, and how many states stay, by the device memory there is.

        Args:
            free_bytes: what forward and backward leave free at their peak.
            step_bytes: what is free in a step that keeps no states, for slots and residents.
        """
        leaves = self._leaves()
        sizes = [_room(self._tensors(leaf).values()) for leaf in leaves]
        states = HostStates(
            total_bytes=sum(sizes),
            largest_bytes=sum(sizes) if self._at_once else max(sizes, default=0),
            num_params=sum(leaf.numel() for leaf in leaves),
            step_bytes=step_bytes,
            num_slots=self.num_slots,
        )
        placed = states.place(free_bytes)
        self.resident_bytes, self.num_slots = placed.resident_bytes, placed.num_slots
        if placed.resident_bytes < states.total_bytes:
            self.chunk_bytes = placed.chunk_bytes

    def offload_all(self) -> None:
        """Move all states to the host; none stay on the device until `fit` says so."""
        self.resident_bytes = 0
        self._put(
            {
                place: to_host(self.mover, value)
                for place, value in self._all_tensors()
                if not self.mover.arena.owns(value)
            }
        )

    def fetch_all(self, leaves: Iterable[Any] | None = None) -> None:
        """Move the states of some parameters, or all, to the device."""
        self._put(
            {
                place: self.mover.fetch(value)
                for place, value in self._all_tensors(leaves)
                if self.mover.arena.owns(value)
            }
        )

    def _all_tensors(self, leaves: Iterable[Any] | None = None) -> Iterator[tuple[_Place, Tensor]]:
        for leaf in list(self.optimizer.state) if leaves is None else leaves:
            if isinstance(leaf, Tensor):
                yield from self._tensors(leaf).items()

    def _leaves(self) -> list[nn.Parameter]:
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def _check_hooks(self) -> None:
        if not self._at_once and has_step_hooks(self.optimizer):
            raise EngineError(
                "the optimizer has step hooks, which would run once per chunk of parameters while "
                "its states stream from the host: remove them, or call them around engine.step()"
            )

    def _residents(self, leaves: list[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameters whose states stay on the device, and move these there."""
        if not self.states:
            return set(leaves)
        chosen: set[nn.Parameter] = set()
        left = self.resident_bytes
        for leaf in leaves:
            size = _room(self._tensors(leaf).values())
            if self.optimizer.state.get(leaf) and size <= left:
                chosen.add(leaf)
                left -= size
        self.fetch_all(chosen)
        return chosen

    def _chunks(self, leaves: list[nn.Parameter], resident: set[nn.Parameter]) -> list[_Chunk]:
        """Group parameters in order until what a rank loads of them reaches the size of a chunk."""
        units = ownership_of(self.optimizer).units
        sizes, chunk_bytes = self._sizes(leaves, resident)
        chunks: list[_Chunk] = []
        used: Counter[int | None] = Counter()
        """On each owner; None: on every rank."""
        for leaf, size in zip(leaves, sizes, strict=True):
            hosts = self._hosts(leaf)
            added = Counter[int | None]({None: _room(hosts[at] for at in hosts if not at[1])})
            added[units[id(leaf)].owner if id(leaf) in units else None] += size
            used += added
            is_full = used[None] + max((n for at, n in used.items() if at is not None), default=0)
            if not chunks or (not self._at_once and is_full > chunk_bytes):
                chunks.append(_Chunk())
                used = added
            chunks[-1].leaves.append(leaf)
            chunks[-1].hosts.update(hosts)
        return chunks

    def _sizes(
        self, leaves: list[nn.Parameter], resident: set[nn.Parameter]
    ) -> tuple[list[int], int]:
        """Return what each parameter's states take in a slot, and the size of a chunk: equal on ranks that own parameters."""
        units = ownership_of(self.optimizer).units
        own = [self._size(leaf, resident, units.get(id(leaf))) for leaf in leaves]
        if not units:
            return own, self.chunk_bytes
        told = torch.tensor([*own, -self.chunk_bytes], device=self.mover.device)
        comm = lookup(next(iter(units.values())).layout.handle)
        rows = comm.gather_small(told, "bytes of states that stream")
        *sizes, negative = rows.amax(0).tolist()
        return sizes, -negative

    def _size(self, leaf: nn.Parameter, resident: set[nn.Parameter], unit: Unit | None) -> int:
        if unit is not None and not unit.is_mine:
            return 0
        size = _room(host for (_, keys), host in self._hosts(leaf).items() if keys)
        if leaf not in resident and not self.optimizer.state.get(leaf):
            # It will make some: about two tensors of its own size.
            size += 2 * (leaf.nbytes if unit is None else unit.spec.numel * leaf.element_size())
        return size + wide_bytes(leaf) if is_rounded(self.optimizer) else size

    def _hosts(self, leaf: nn.Parameter) -> dict[_Place, Tensor]:
        """Return what of a parameter and its states waits on the host."""
        found = {(leaf, ()): leaf.data, **self._tensors(leaf)}
        return {place: value for place, value in found.items() if self.mover.arena.owns(value)}

    def _load(self, chunk: _Chunk) -> None:
        places = {
            key: torch.empty_like(host, device=self.mover.device)
            for key, host in chunk.hosts.items()
        }
        pairs = list(zip(chunk.hosts.values(), places.values(), strict=True))
        self._put(places)
        chunk.copy = self.mover.begin_copy("to_device", pairs)

    def _store(self, chunk: _Chunk, resident: set[nn.Parameter]) -> None:
        values = {(leaf, ()): leaf.data for leaf in chunk.leaves if (leaf, ()) in chunk.hosts}
        for leaf in chunk.leaves:
            if leaf not in resident:
                values |= self._tensors(leaf)
        chunk.stores = {
            place: host
            if (host := chunk.hosts.get(place)) is not None and _is_like(host, value)
            else self.mover.arena.device_like(value)
            for place, value in values.items()
        }
        pairs = list(zip(values.values(), chunk.stores.values(), strict=True))
        chunk.copy = self.mover.begin_copy("to_host", pairs)

    def _end_store(self, chunk: _Chunk) -> None:
        _end(chunk)
        self._put(chunk.stores)

    def _tensors(self, leaf: Tensor) -> dict[_Place, Tensor]:
        """Return the states of a parameter that are worth moving: not the count of its steps."""
        return {(leaf, keys): each for keys, each in _found((), self.optimizer.state.get(leaf, {}))}

    def _put(self, values: dict[_Place, Tensor]) -> None:
        """Let parameters and states be these tensors."""
        for (leaf, keys), value in values.items():
            if not keys:
                leaf.data = value
                continue
            holder = self.optimizer.state[leaf]
            for key in keys[:-1]:
                holder = holder[key]
            holder[keys[-1]] = value


def _found(keys: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the plain tensors of a state, which may be a list or dict, and the keys that lead to them."""
    if type(value) in (Tensor, nn.Parameter) and value.dim() > 0 and value.numel() > 0:
        yield keys, value
    pairs = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else pairs:
        yield from _found((*keys, key), each)


def _is_like(host: Tensor, value: Tensor) -> bool:
    return (host.shape, host.stride(), host.dtype) == (value.shape, value.stride(), value.dtype)


def _end(chunk: _Chunk) -> None:
    """Wait for the copy of a chunk that is under way."""
    assert chunk.copy is not None
    chunk.copy()


def _room(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take in a slot."""
    return sum(-(-each.nbytes // _ALIGN) * _ALIGN for each in tensors)


def to_host(mover: Mover, value: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory that answers as one of its device."""
    host = mover.arena.device_like(value)
    mover.begin_copy("to_host", [(value, host)])()
    return host
