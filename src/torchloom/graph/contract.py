"""What a pass is: one function, one signature, declared needs.

A pass edits `gm.graph` in place and returns how many edits it made. Lint, recompilation, timing,
text dumps and error context belong to the pass manager. A pass is a pure function of the graph
and the context: no clock, no environment, no rank, so that all ranks build the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

Stage = Literal["joint", "lowered"]
"""joint: before the forward/backward split. lowered: each of the two graphs after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a plan decided about the values of one joint graph: names of nodes, of parameters.

    Activations that are named nowhere are kept.
    """

    recompute: frozenset[str] | None = None
    """Activations that backward computes again; None leaves it to the partitioner."""
    offload: frozenset[str] | None = None
    """Activations that wait in host memory for backward; None leaves it to the pass."""
    resident: frozenset[str] = frozenset()
    """Parameters that are gathered once per optimizer step."""
    keep: frozenset[str] = frozenset()
    """Parameters whose gathered weight stays from forward to backward."""
    prefetch_bytes: int | None = None
    """Weights gathered ahead of their use may hold this much; None leaves it to the context."""
    bucket_bytes: int | None = None
    """Transfers are merged up to this size, or the context's where that is smaller."""

    def key(self) -> str:
        """Return the choices as text that is equal on all ranks, whatever the order of sets."""
        parts = (self.recompute, self.offload, self.resident, self.keep)
        names = tuple(None if part is None else tuple(sorted(part)) for part in parts)
        return repr((*names, self.prefetch_bytes, self.bucket_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWeights:
    """Sharded parameters that lie whole in memory that all ranks map."""

    name: str
    """What graphs call them; equal on all ranks."""
    handle: str
    """The communicator of these ranks."""
    params: tuple[tuple[str, torch.dtype], ...]
    """Name and dtype of each, in the order in which graphs number them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """Read-only facts shared by all passes of one compile."""

    world_size: int
    """Ranks that share one copy of the weights."""
    gather_bucket_bytes: int = 16 << 20
    """Gathers are merged until their results reach this size."""
    reduce_bucket_bytes: int = 16 << 20
    """Reductions are merged until their inputs reach this size."""
    prefetch_bytes: int = 16 << 20
    """Weights gathered ahead of their use may hold this much memory."""
    prefetch_is_bound: bool = False
    """Whether the user gave `prefetch_bytes`: a plan may then only take less."""
    handle: str = ""
    """The communicator of the model that these facts are about; "": a graph names no other."""
    sliced: tuple[str, ...] = ()
    """Whole parameters of which each rank's optimizer steps only its own slice (stage 1)."""
    host_params: tuple[str, ...] = ()
    """Sharded parameters whose pieces can wait in host memory until they are gathered."""
    offload_min_bytes: int = 1 << 20
    """Activations with fewer bytes stay on the device, unless a plan names them."""
    pin_memory: bool = True
    """Host copies are page-locked where the device can use it."""
    copy_slots: int = 2
    """Copies under way at a time between device and host, per direction."""
    copy_bytes: int = 256 << 20
    """Device memory that copies under way may hold; a single copy may always run."""
    free_min_bytes: int = 10 << 20
    """Saved activations with fewer bytes are left to the backend."""
    keeps_inputs: bool = False
    """Whether the backend's code holds its inputs until it returns."""
    is_backward: bool = False
    """Whether the lowered graph is the backward one."""
    choices: Choices | None = None
    """What the plan decided about this graph; None where there is no plan."""
    memory_budget_bytes: int | None = None
    """Device memory that a step may use at its peak; None where nobody has said."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Which parameter each input of this graph holds (a piece of it, or all): input -> name.
    Follows from the graph, so it is not part of the key."""
    cast_params: tuple[str, ...] | None = None
    """Parameters that may be cast before they are gathered; None: all."""
    shared_weights: SharedWeights | None = None
    """Weights that are read in place, without a gather."""

    def is_about(self, handle: str) -> bool:
        """Say whether these facts are about the parameters that a node names beside this handle.

        A graph may hold weights of another engine's model, which was called in forward: their names
        may be the same.
        """
        return self.handle in ("", handle)

    def key(self) -> str:
        """Return everything a pass may depend on, as text for cache keys."""
        choices = "None" if self.choices is None else self.choices.key()
        return f"{replace(self, choices=None, params={})!r} {choices}"


PassFn = Callable[[fx.GraphModule, PassContext], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPass:
    """A pass and what it needs and gives."""

    name: str
    fn: PassFn
    stage: Stage
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    memory_budget_bytes: int | None = None
    """What a schedule gave this pass; replaces the context's budget."""
