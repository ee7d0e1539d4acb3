"""What a compiled step needs from an engine or a training loop: other ranks and host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from torchloom.exchange import Agreement
from torchloom.memory import StepMemory, WorkspaceTable

STATES, SHARDS = "offload_opt_states", "offload_parameters"
"""Names of the passes that keep optimizer states, or shards of parameters, in host memory."""


OwnedMemory = Callable[[WorkspaceTable], StepMemory | None]
"""Finds out what a rank allocates in a step that is more than its optimizer's own, and keeps; None where that is not known.
Parameters must hold what the optimizer steps."""


class HostMemory(Protocol):
    """Moves optimizer states and shards of one model between device and host memory."""

    @property
    def names(self) -> frozenset[str]:
        """What lives on the host now: `STATES`, `SHARDS`."""
        ...

    def follow(self, names: Collection[str]) -> None:
        """Move to the host what the named passes require; move the rest back to the device."""
        ...

    def make_room(self) -> None:
        """Move all that may wait to the host, until the next `fit` and `keep_shards`."""
        ...

    def keep_shards(self, names: Collection[str]) -> None:
        """Keep the shards of these parameters, and no others, on the device."""
        ...

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        """Keep as many optimizer states on the device as there is room for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """What an engine, or the user's own loop, gives a compiled step."""

    ranks: Agreement
    host: HostMemory
    optimizer: Optimizer | None = None
    """Over this rank's shards; None without training, or where plans do not count its states."""
    owned_memory: OwnedMemory | None = None
    """Of the optimizer; None where each rank steps its shards alone, as they are."""
    by_parts: bool = True
    """Whether states that wait on the host are needed some at a time, or all at once, for the optimizer's step."""
    step: int = 0
    """Number of the next optimizer step."""
    as_shards: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """A `with` block in which parameters hold what the optimizer steps."""
    before_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    """Called with the arguments of each call of the model before it: in a loop, which may update weights in ways
    that leave no trace (fused optimizers, `param.data`), to drop gathered ones. None: an engine drops them after each update."""
    may_keep: bool = True
    """Whether custom passes may ask for weights that stay gathered."""
    name: str = "engine.compile()"
    """What the user called, for messages."""

    @property
    def keeps_over_micro_steps(self) -> bool:
        """Whether gathered weights stay until the update, not until the next forward pass."""
        return self.before_forward is None
