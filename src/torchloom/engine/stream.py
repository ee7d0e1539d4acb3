"""Optimizer states, and shards of parameters, that live in host memory and stream through the step.

At rest the tensors in `optimizer.state`, and the data of offloaded shards, are host memory. In a
step chunks of parameters take turns: their tensors are loaded into a slot of device memory, torch's
optimizer steps just them, and what it wrote goes back. Every optimizer here steps each parameter on
its own, so stepping chunk by chunk gives bitwise the same result as stepping all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.engine.elementwise import ELEMENTWISE
from torchloom.engine.stream_plan import stream_actions
from torchloom.errors import EngineError
from torchloom.plan.states import CHUNK_BYTES, HostStates
from torchloom.runtime.host import Mover, Ticket

_ALIGN = 64


@dataclass
class _Chunk:
    """Parameters that step together, and where their tensors wait."""

    leaves: list[nn.Parameter]
    hosts: dict[tuple[nn.Parameter, str], Tensor] = field(default_factory=dict)
    """Host tensors that were loaded, by parameter and state; the empty name is the parameter."""
    load: Ticket | None = None
    stores: list[tuple[nn.Parameter, str, Tensor]] = field(default_factory=list)
    """(parameter, state, host tensor) that are on their way back."""
    store: Ticket | None = None


@dataclass
class StateStream:
    """Steps an optimizer whose states live on the host.

    Args:
        optimizer: one of torch's elementwise optimizers.
        mover: moves between its device and the host.
        num_slots: chunks that may be on the device at a time.
        chunk_bytes: size of a chunk, see `plan.states.CHUNK_BYTES`.
        states: whether states live on the host; otherwise only offloaded parameters stream.

    Raises:
        EngineError: the optimizer does more than step each parameter on its own.
    """

    optimizer: Optimizer
    mover: Mover
    num_slots: int = 2
    chunk_bytes: int = CHUNK_BYTES
    states: bool = True
    resident_bytes: int = 0
    """States that stay on the device, in bytes: of each parameter in turn that still fits."""

    _streamed: set[nn.Parameter] = field(default_factory=set, init=False)

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
        leaves = [
            leaf
            for group in self.optimizer.param_groups
            for leaf in group["params"]
            if leaf.grad is not None
        ]
        chunks = self._chunks(leaves, self._residents(leaves))
        slots = self._make_slots(chunks)
        for kind, index in stream_actions(len(chunks), self.num_slots):
            chunk = chunks[index]
            if kind == "load":
                self._load(chunk, slots[index % self.num_slots])
            elif kind == "step":
                with self._only(chunk.leaves):
                    self.optimizer.step()
            elif kind == "store":
                self._store(chunk)
            elif kind == "await load":
                _finish(chunk.load)
            else:
                self._settle(chunk)

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Choose the size of chunks, and how many states stay, by the device memory there is.

        Args:
            free_bytes: what forward and backward leave free at their peak.
            step_bytes: what is free in a step that keeps no states, for slots and residents.
        """
        leaves = [leaf for group in self.optimizer.param_groups for leaf in group["params"]]
        sizes = [sum(_room(value) for _, value in self._tensors(leaf)) for leaf in leaves]
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

    def _check_hooks(self) -> None:
        hooks = [
            *getattr(self.optimizer, "_optimizer_step_pre_hooks", ()),
            *getattr(self.optimizer, "_optimizer_step_post_hooks", ()),
        ]
        if hooks:
            raise EngineError(
                "the optimizer has step hooks, which would run once per chunk of parameters while "
                "its states stream from the host: remove them, or call them around engine.step()"
            )

    @contextmanager
    def _only(self, leaves: list[nn.Parameter]) -> Iterator[None]:
        """Show the optimizer only some of its parameters, inside a `with` block."""
        chosen, groups = set(leaves), self.optimizer.param_groups
        before = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [leaf for leaf in group["params"] if leaf in chosen]
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def _residents(self, leaves: Iterable[nn.Parameter]) -> set[nn.Parameter]:
        """Return the parameters whose states stay on the device."""
        if not self.states:
            return set(leaves)
        chosen: set[nn.Parameter] = set()
        used = 0
        for leaf in leaves:
            size = sum(_room(value) for _, value in self._tensors(leaf))
            if self.optimizer.state.get(leaf) and used + size <= self.resident_bytes:
                chosen.add(leaf)
                used += size
        for leaf in chosen:
            for key, value in self._tensors(leaf):
                if self.mover.arena.owns(value):
                    self.optimizer.state[leaf][key] = self.mover.fetch(value)
        return chosen

    def offload_all(self) -> None:
        """Move all states to the host; none stay on the device until `fit` says so."""
        self.resident_bytes = 0
        for leaf, state in self.optimizer.state.items():
            for key, value in self._tensors(leaf):
                if not self.mover.arena.owns(value):
                    host = self.mover.arena.device_like(value)
                    self.mover.begin_copy("to_host", [(value, host)]).finish()
                    state[key] = host

    def fetch_all(self) -> None:
        """Move all states to the device."""
        for leaf, state in self.optimizer.state.items():
            for key, value in self._tensors(leaf):
                if self.mover.arena.owns(value):
                    state[key] = self.mover.fetch(value)

    def _chunks(self, leaves: list[nn.Parameter], resident: set[nn.Parameter]) -> list[_Chunk]:
        """Group parameters in order until their host tensors reach the size of a chunk."""
        chunks: list[_Chunk] = []
        used = 0
        for leaf in leaves:
            hosts = {
                (leaf, key): value
                for key, value in [("", leaf.data), *self._tensors(leaf)]
                if self.mover.arena.owns(value)
            }
            # What has no state yet will make some: about two tensors of its own size.
            size = sum(map(_room, hosts.values()))
            if leaf not in resident and not self.optimizer.state.get(leaf):
                size += 2 * leaf.nbytes
            if not chunks or used + size > self.chunk_bytes:
                chunks.append(_Chunk([]))
                used = 0
            used += size
            chunks[-1].leaves.append(leaf)
            chunks[-1].hosts.update(hosts)
        self._streamed = set(leaves) - resident
        return chunks

    def _make_slots(self, chunks: list[_Chunk]) -> list[Tensor]:
        size = max((sum(map(_room, chunk.hosts.values())) for chunk in chunks), default=0)
        num = min(self.num_slots, len(chunks))
        return [torch.empty(size, dtype=torch.uint8, device=self.mover.device) for _ in range(num)]

    def _load(self, chunk: _Chunk, slot: Tensor) -> None:
        offset, pairs = 0, []
        for (leaf, key), host in chunk.hosts.items():
            place = slot[offset : offset + host.nbytes].view(host.dtype)
            place = place.as_strided(host.size(), host.stride())
            pairs.append((host, place))
            self._put(leaf, key, place)
            offset += _room(host)
        chunk.load = self.mover.begin_copy("to_device", pairs)

    def _store(self, chunk: _Chunk) -> None:
        pairs = []
        for leaf in chunk.leaves:
            if (leaf, "") in chunk.hosts:
                pairs.append((leaf.data, chunk.hosts[leaf, ""]))
                chunk.stores.append((leaf, "", pairs[-1][1]))
            if leaf not in self._streamed:
                continue
            for key, value in self._tensors(leaf):
                host = chunk.hosts.get((leaf, key))
                if host is None:
                    host = self.mover.arena.device_like(value)
                pairs.append((value, host))
                chunk.stores.append((leaf, key, host))
        chunk.store = self.mover.begin_copy("to_host", pairs)

    def _settle(self, chunk: _Chunk) -> None:
        """Let parameters and states be their host tensors again."""
        _finish(chunk.store)
        for leaf, key, host in chunk.stores:
            self._put(leaf, key, host)
        chunk.stores.clear()

    def _tensors(self, leaf: Tensor) -> list[tuple[str, Tensor]]:
        """Return the states of a parameter that are worth moving: not the count of its steps."""
        return [
            (key, value)
            for key, value in self.optimizer.state.get(leaf, {}).items()
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0
        ]

    def _put(self, leaf: nn.Parameter, key: str, value: Tensor) -> None:
        if key:
            self.optimizer.state[leaf][key] = value
        else:
            leaf.data = value


def _room(host: Tensor) -> int:
    """Bytes that a tensor takes in a slot."""
    return -(-host.nbytes // _ALIGN) * _ALIGN


def _finish(ticket: Ticket | None) -> None:
    assert ticket is not None, "awaited before it was issued"
    ticket.finish()
