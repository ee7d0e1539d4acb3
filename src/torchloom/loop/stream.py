"""Stream optimizer states, and shards of parameters, from host memory through the optimizer's step.

At rest the tensors in `optimizer.state`, and the data of offloaded shards, are host memory. In a
step chunks of parameters take turns: their tensors are loaded into device memory, torch's
optimizer steps just them, and what it wrote goes back. Every optimizer here steps each parameter on
its own, so stepping chunk by chunk gives bitwise the same result as stepping all at once.

    one slot     load 0, step 0, store 0 | load 1, step 1, store 1 | ...
    two slots    load 1 runs beside step 0, and beside store 0 if the link carries both directions

A slot is free again when the store that read it is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.errors import EngineError
from torchloom.loop.elementwise import ELEMENTWISE, has_step_hooks
from torchloom.loop.rounding import Rounding, only, wide_bytes
from torchloom.plan.states import CHUNK_BYTES, HostStates
from torchloom.runtime.host import Mover, Ticket

_ALIGN = 64


@dataclass
class _Chunk:
    """Parameters that step together, and where their tensors wait."""

    leaves: list[nn.Parameter] = field(default_factory=list)
    hosts: dict[tuple[nn.Parameter, str], Tensor] = field(default_factory=dict)
    """Host tensors that are loaded, by parameter and state; the empty name is the parameter."""
    stores: dict[tuple[nn.Parameter, str], Tensor] = field(default_factory=dict)
    """Those that are written on the way back, which may be new ones."""
    copy: Ticket | None = None
    """Under way."""


@dataclass
class StateStream:
    """Steps an optimizer whose states live on the host.

    Args:
        optimizer: one of torch's elementwise optimizers.
        mover: moves between its device and the host.
        num_slots: chunks that may be on the device at a time.
        chunk_bytes: size of a chunk, see `plan.states.CHUNK_BYTES`.
        states: whether states live on the host; otherwise only offloaded parameters stream.
        rounding: steps bf16 parameters in fp32; None: they step as they are.

    Raises:
        EngineError: the optimizer does more than step each parameter on its own.
    """

    optimizer: Optimizer
    mover: Mover
    num_slots: int = 2
    chunk_bytes: int = CHUNK_BYTES
    states: bool = True
    rounding: Rounding | None = None
    resident_bytes: int = 0
    """States that stay on the device, in bytes: of each parameter in turn that still fits."""

    def __post_init__(self) -> None:
        if type(self.optimizer) not in ELEMENTWISE:
            known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
            raise EngineError(
                f"{type(self.optimizer).__name__} cannot step with its states on the host, a chunk "
                f"of parameters at a time; these can: {known}. Use one of them, or drop "
                "offload_opt_states and offload_parameters"
            )

    def step(self) -> None:
        """Step all parameters that have a gradient.

        Raises:
            EngineError: the optimizer has step hooks, which would run once per chunk.
        """
        self._check_hooks()
        leaves = [leaf for leaf in self._leaves() if leaf.grad is not None]
        resident = self._residents(leaves)
        chunks = self._chunks(leaves, resident)
        num_loaded = 0
        for index, chunk in enumerate(chunks):
            # Load this chunk, and those after it for which there is room.
            for ahead in range(num_loaded, min(index + self.num_slots, len(chunks))):
                if ahead >= self.num_slots:
                    self._end_store(chunks[ahead - self.num_slots])
                self._load(chunks[ahead])
                num_loaded += 1
            _end(chunk)
            with only(self.optimizer, chunk.leaves), self._in_fp32(chunk.leaves):
                self.optimizer.step()
            self._store(chunk, resident)
        for chunk in chunks[-self.num_slots :]:
            self._end_store(chunk)

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
            largest_bytes=max(sizes, default=0),
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
        for leaf, state in self.optimizer.state.items():
            for key, value in self._tensors(leaf).items():
                if not self.mover.arena.owns(value):
                    state[key] = to_host(self.mover, value)

    def fetch_all(self, leaves: Iterable[Any] | None = None) -> None:
        """Move the states of some parameters, or all, to the device."""
        for leaf in self.optimizer.state if leaves is None else leaves:
            for key, value in self._tensors(leaf).items():
                if self.mover.arena.owns(value):
                    self.optimizer.state[leaf][key] = self.mover.fetch(value)

    def _leaves(self) -> list[nn.Parameter]:
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def _check_hooks(self) -> None:
        if has_step_hooks(self.optimizer):
            raise EngineError(
                "the optimizer has step hooks, which would run once per chunk of parameters while "
                "its states stream from the host: remove them, or call them around engine.step()"
            )

    def _in_fp32(self, leaves: list[nn.Parameter]) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self.rounding is None
            else self.rounding.in_fp32(self.optimizer, leaves)
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
        """Group parameters in order until their host tensors reach the size of a chunk."""
        chunks: list[_Chunk] = []
        used = 0
        for leaf in leaves:
            tensors = {"": leaf.data, **self._tensors(leaf)}
            hosts = {(leaf, key): v for key, v in tensors.items() if self.mover.arena.owns(v)}
            # What has no state yet will make some: about two tensors of its own size.
            size = _room(hosts.values())
            if leaf not in resident and not self.optimizer.state.get(leaf):
                size += 2 * leaf.nbytes
            if self.rounding is not None:
                size += wide_bytes(leaf)
            if not chunks or used + size > self.chunk_bytes:
                chunks.append(_Chunk())
                used = 0
            used += size
            chunks[-1].leaves.append(leaf)
            chunks[-1].hosts.update(hosts)
        return chunks

    def _load(self, chunk: _Chunk) -> None:
        places = {
            key: torch.empty_like(host, device=self.mover.device)
            for key, host in chunk.hosts.items()
        }
        pairs = list(zip(chunk.hosts.values(), places.values(), strict=True))
        self._put(places)
        chunk.copy = self.mover.begin_copy("to_device", pairs)

    def _store(self, chunk: _Chunk, resident: set[nn.Parameter]) -> None:
        values = {(leaf, ""): leaf.data for leaf in chunk.leaves if (leaf, "") in chunk.hosts}
        for leaf in chunk.leaves:
            if leaf not in resident:
                values |= {(leaf, key): value for key, value in self._tensors(leaf).items()}
        chunk.stores = {
            key: host
            if (host := chunk.hosts.get(key)) is not None
            else self.mover.arena.device_like(value)
            for key, value in values.items()
        }
        pairs = list(zip(values.values(), chunk.stores.values(), strict=True))
        chunk.copy = self.mover.begin_copy("to_host", pairs)

    def _end_store(self, chunk: _Chunk) -> None:
        _end(chunk)
        self._put(chunk.stores)

    def _tensors(self, leaf: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter that are worth moving: not the count of its steps."""
        return {
            key: value
            for key, value in self.optimizer.state.get(leaf, {}).items()
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0
        }

    def _put(self, values: dict[tuple[nn.Parameter, str], Tensor]) -> None:
        """Let parameters and states be these tensors."""
        for (leaf, key), value in values.items():
            if key:
                self.optimizer.state[leaf][key] = value
            else:
                leaf.data = value


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
