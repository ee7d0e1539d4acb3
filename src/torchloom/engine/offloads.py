"""What of the training state lives in host memory: asked for by settings, or by passes by name.

    optimizer states   pass `offload_opt_states`: the step streams them, see `engine.stream`
    pieces             pass `offload_parameters`: gathers reload them, see `engine.pieces`

Without compiled code the settings decide; with it the passes that run do, so a schedule can begin or
end either at a step, and `compile.disable_passes` turns it off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.engine.pieces import offloaded_params, place_pieces
from torchloom.engine.stream import StateStream
from torchloom.errors import ConfigError
from torchloom.pipeline.presets import ALIASES
from torchloom.runtime import mover_of
from torchloom.shard import Layout

STATES, PIECES = "offload_opt_states", "offload_parameters"


@dataclass
class Offloads:
    """Moves optimizer states and pieces of one sharded model, and steps its optimizer.

    Args:
        config: the run's settings.
        model: sharded; its pieces are where they were made.
        layout: how it is sharded.
        optimizer: steps this rank's leaves; None for a model that is only evaluated.
        device: where the model computes.
    """

    config: Config
    model: nn.Module
    layout: Layout
    optimizer: Optimizer | None
    device: torch.device
    names: frozenset[str] = field(default=frozenset(), init=False)
    """What lives on the host now, by the names of passes."""
    _stream: StateStream | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        asked = {STATES: self.config.offload.opt_states, PIECES: self.config.offload.parameters}
        disabled = {ALIASES.get(name, name) for name in self.config.compile.disable_passes}
        self.follow([name for name, on in asked.items() if on and name not in disabled])

    def follow(self, names: Collection[str]) -> None:
        """Let live on the host what these passes say; the rest comes back to the device.

        Raises:
            EngineError: the optimizer does more than step each parameter on its own.
            ConfigError: pieces cannot leave memory that ranks share.
        """
        wanted = frozenset({STATES, PIECES}) & frozenset(names)
        if wanted == self.names:
            return
        if PIECES in wanted and self.config.compile.symmetric_memory:
            raise ConfigError(
                f"pass {PIECES!r} and compile.symmetric_memory exclude each other: the latter keeps "
                "parameters in memory that ranks share. Drop one of them"
            )
        moved = wanted ^ self.names
        if self.optimizer is not None and wanted and self._stream is None:
            slots = 2 if self.config.offload.double_buffer else 1
            self._stream = StateStream(self.optimizer, mover_of(self.device), num_slots=slots)
        self.names = wanted
        if PIECES in moved:
            self.keep_pieces(())
        if self._stream is not None:
            self._stream.states = STATES in wanted
            if STATES in moved and STATES not in wanted:
                self._stream.fetch_all()

    def step(self, optimizer: Optimizer) -> None:
        """Step all of this rank's leaves that have a gradient."""
        if self._stream is None or not self.names:
            optimizer.step()
        else:
            self._stream.step()

    def keep_pieces(self, names: Collection[str]) -> None:
        """Let the pieces of these parameters, and no others, stay on the device."""
        waiting = frozenset(offloaded_params(self.layout)) - frozenset(names)
        place_pieces(
            self.model, self.layout, mover_of(self.device), waiting if PIECES in self.names else ()
        )

    def placed(self, value: Tensor, *, like: Tensor) -> Tensor:
        """Return an optimizer state of the parameter `like` where such states live."""
        shape = like if value.shape == like.shape else value
        state = torch.empty_like(shape, dtype=value.dtype, device=like.device)
        arena = mover_of(self.device).arena
        if STATES not in self.names or value.dim() == 0 or value.numel() == 0:
            return state.copy_(value)
        host = arena.device_like(state)
        arena.host_alias(host).copy_(value)
        return host

    def make_room(self) -> None:
        """Let no states and pieces stay on the device, until the next `fit` and `keep_pieces`."""
        if PIECES in self.names:
            self.keep_pieces(())
        if self._stream is not None and STATES in self.names:
            self._stream.offload_all()

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Let as many states stay on the device between steps as there is room for.

        Args:
            free_bytes: device memory that forward and backward leave free at their peak.
            step_bytes: device memory that is free in the optimizer step, without any states.
        """
        if self._stream is not None and STATES in self.names:
            self._stream.fit(free_bytes, step_bytes)
