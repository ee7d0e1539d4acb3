"""Move training state to host memory, as settings or passes require.

    optimizer states   pass `offload_opt_states`: the step streams them, see `loop.stream`
    shards             pass `offload_parameters`: gathers reload them, see `place_shards`

Without compiled code the settings decide. With compiled code the running passes decide, so a schedule can
begin or end either at a step, and `compile.disable_passes` turns it off.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.errors import ConfigError
from torchloom.loop.ownership import ownership_of
from torchloom.loop.stream import StateStream, to_host
from torchloom.pipeline.registry import ALIASES, offloadable_params
from torchloom.runtime import Mover, mover_of
from torchloom.shard import Layout, owners_of
from torchloom.step.interfaces import SHARDS, STATES


@dataclass
class Offloads:
    """Moves optimizer states and shards of one sharded model, and steps its optimizer.

    Args:
        config: the run's settings.
        model: sharded; its shards are where they were made.
        layout: how it is sharded.
        optimizer: steps this rank's leaves; None for a model that is only evaluated.
        device: where the model computes.
    """

    config: Config
    model: InitVar[nn.Module]
    layout: Layout
    optimizer: Optimizer | None
    device: torch.device
    names: frozenset[str] = field(default=frozenset(), init=False)
    """What lives on the host now, by the names of passes."""
    _before_away: frozenset[str] | None = field(default=None, init=False)
    """What lived on the host before `away`; None where all is back."""
    _stream: StateStream | None = field(default=None, init=False)

    def __post_init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # the engine or loop that drives the model owns it
        asked = {STATES: self.config.offload.opt_states, SHARDS: self.config.offload.parameters}
        disabled = {ALIASES.get(name, name) for name in self.config.compile.disable_passes}
        self.follow([name for name, on in asked.items() if on and name not in disabled])

    def follow(self, names: Collection[str]) -> None:
        """Move to the host what the named passes require; move the rest back to the device.

        Raises:
            ConfigError: shards cannot leave memory that ranks share.
        """
        wanted = frozenset({STATES, SHARDS}) & frozenset(names)
        if wanted == self.names:
            return
        if SHARDS in wanted and self.config.compile.symmetric_memory:
            raise ConfigError(
                f"pass {SHARDS!r} and compile.symmetric_memory exclude each other: the latter keeps "
                "parameters in memory that ranks share. Drop one of them"
            )
        moved = wanted ^ self.names
        if self.optimizer is not None and wanted and self._stream is None:
            slots = 2 if self.config.offload.double_buffer else 1
            self._stream = StateStream(self.optimizer, mover_of(self.device), num_slots=slots)
        self.names = wanted
        if SHARDS in moved:
            self.keep_shards(())
        if self._stream is not None:
            self._stream.states = STATES in wanted
            if STATES in moved and STATES not in wanted:
                self._stream.fetch_all()

    def step(self, optimizer: Optimizer, step: int) -> None:
        """Step all of this rank's leaves that have a gradient.

        Args:
            optimizer: over them.
            step: number of the optimizer step, which chooses the bits of a stochastic rounding.
        """
        ownership_of(optimizer).step = step
        if self._stream is not None and self.names:
            self._stream.step()
        else:
            optimizer.step()

    def keep_shards(self, names: Collection[str]) -> None:
        """Let the shards of these parameters, and no others, stay on the device."""
        waiting = frozenset(offloadable_params(self.layout)) - frozenset(names)
        model = self._model()
        assert model is not None, "its driver has let go of it"
        place_shards(
            model, self.layout, mover_of(self.device), waiting if SHARDS in self.names else ()
        )

    def placed(self, value: Tensor, device: torch.device) -> Tensor:
        """Return an optimizer state of a parameter on `device` where such states live."""
        state = torch.empty_like(value, device=device)
        arena = mover_of(self.device).arena
        if STATES not in self.names or value.dim() == 0 or value.numel() == 0:
            return state.copy_(value)
        host = arena.device_like(state)
        if self.device.type == "cuda":  # copies out of the block's last tensor may be queued
            torch.cuda.synchronize(self.device)
        arena.host_alias(host).copy_(value)
        return host

    def away(self, include: Collection[Any] | None, device: Any) -> None:
        """Move states, shards or both to the host until `back`; see `Engine.offload_states`.

        Raises:
            ConfigError: another device, or shards that cannot leave memory that ranks share.
        """
        if _value(device) != "cpu":
            raise ConfigError(
                f'offload_states(device={_value(device)!r}): states move to "cpu" only'
            )
        kinds = None if include is None else {_value(each) == "optim_states" for each in include}
        moved = (
            {STATES, SHARDS} if kinds is None else {STATES if each else SHARDS for each in kinds}
        )
        self._before_away = self.names if self._before_away is None else self._before_away
        self.follow(self.names | moved)
        self.make_room()

    def back(self) -> None:
        """Undo `away`."""
        if self._before_away is not None:
            self.follow(self._before_away)
            self._before_away = None

    def make_room(self) -> None:
        """Move all states and shards that may wait to the host, until the next `fit` and `keep_shards`."""
        if SHARDS in self.names:
            self.keep_shards(())
        if self._stream is not None and STATES in self.names:
            self._stream.offload_all()

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Keep as many states on the device between steps as there is room for.

        Args:
            free_bytes: device memory that forward and backward leave free at their peak.
            step_bytes: device memory that is free in the optimizer step, without any states.
        """
        if self._stream is not None and STATES in self.names:
            self._stream.fit(free_bytes, step_bytes)


def _value(choice: Any) -> Any:
    """Return the value of a choice, which may be a member of one of DeepSpeed's enums."""
    return getattr(choice, "value", choice)


def place_shards(model: nn.Module, layout: Layout, mover: Mover, waiting: Collection[str]) -> None:
    """Let these parameters' shards, and no others, wait on the host.

    Args:
        model: sharded.
        layout: how it is sharded.
        mover: copies between device and host.
        waiting: names of parameters.
    """
    params, chosen = owners_of(model), set(waiting)
    for name in offloadable_params(layout):
        data = params[name].data
        is_on_host = mover.arena.owns(data)
        if name in chosen and not is_on_host:
            params[name].data = to_host(mover, data)
        elif name not in chosen and is_on_host:
            params[name].data = mover.fetch(data)
