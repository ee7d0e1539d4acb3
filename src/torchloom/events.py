"""Typed events: what happened, for whoever listens.

Any room may emit; nobody below knows who listens. An event is a frozen record with a `kind`; a
`Recorder` collects those emitted while it is open. With no recorder open, `emit` costs one check.
Events carry plain data only (numbers, strings, tuples), so a recording never keeps a tensor alive
and can be written as JSON.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events; `at_s` is the wall clock in seconds since the epoch."""

    at_s: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, object]:
        """Return the event as plain data, with its kind."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class PassRan(Event):
    """A graph pass ran over one graph."""

    name: str
    stage: str
    graph: str
    num_edits: int
    duration_s: float
    compile_id: str | None = None
    """Dynamo's id of the compile that the pass was a part of."""
    before: str | None = None
    """Text of the graph before a pass that edited it."""
    after: str | None = None
    curve: tuple[int, ...] | None = None
    """Bytes alive after each node of the graph as the pass left it."""


@dataclass(frozen=True, kw_only=True)
class ProgramReady(Event):
    """A program that serves a range of sizes was built or loaded."""

    model: str
    origin: str
    """"built" or "loaded"."""
    key: str
    """Its name in a store."""
    contract: str
    """What its calls look like."""
    seconds: float
    """How long building or loading took."""
    boxes: tuple[str, ...]
    """The sizes that each of its variants is for."""
    num_calls: tuple[int, ...]
    """How many graphs run in a call of each variant."""
    num_graphs: int
    """Different graphs in it."""
    verdicts: tuple[str, ...]
    """What was assumed of sizes, and that it holds."""


@dataclass(frozen=True, kw_only=True)
class PassesSkipped(Event):
    """A weave failed and the model runs as it was, eagerly sharded."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CompileStarted(Event):
    """Dynamo handed a graph over for compilation."""

    graph: str
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class CompileFinished(Event):
    """A graph was compiled; `from_cache` when no pass had to run."""

    graph: str
    duration_s: float
    from_cache: bool


@dataclass(frozen=True, kw_only=True)
class LoweredCompiled(Event):
    """The compiler wrote code for one of the graphs that a captured graph was split into."""

    graph: str
    lowered: str
    """forward, backward or inference."""
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class GraphPlanned(Event):
    """A plan for a captured graph was settled."""

    graph: str
    plan: Mapping[str, object]
    """The fields of `torchloom.plan.GraphPlan`, decisions included."""
    planning_s: float
    """Time of all tries in the planner; 0 where the plan came with cached code."""
    num_tries: int
    """How often the graph was compiled until code kept the budget well."""


@dataclass(frozen=True, kw_only=True)
class PlanReviewed(Event):
    """Ranks measured the operators of their graphs, and asked whether that changes the plan."""

    step: int
    """Optimizer steps done before."""
    duration_s: float
    changes: bool


@dataclass(frozen=True, kw_only=True)
class PeakFound(Event):
    """The peak of a captured graph's forward and backward was predicted, and what is alive at it."""

    graph: str
    contents: Mapping[str, object]
    """The fields of `torchloom.memory.Contents`."""


@dataclass(frozen=True, kw_only=True)
class StandingFound(Event):
    """What lives on the device between forwards and backwards was added up."""

    budget_bytes: int | None
    """What the user gave for everything."""
    base_bytes: int
    """All of it, on the rank that has most."""
    step_bytes: int
    """What the optimizer's step adds."""
    parts: tuple[tuple[str, str, int], ...]
    """(kind, layer, bytes) of this rank."""


@dataclass(frozen=True, kw_only=True)
class BackendChosen(Event):
    """A fallback settled on a backend; `failed` pairs the ones before it with their reasons."""

    backend: str
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveRan(Event):
    """A collective was issued, waited for, and done; times are seconds since the epoch."""

    op: str
    """gather, reduce or sync."""
    num_tensors: int
    num_bytes: int
    """Bytes of the full tensors."""
    start_s: float
    wait_s: float
    """When the wait for it began: what lies between start and wait ran beside it."""
    end_s: float
    params: tuple[str, ...] = ()
    """Names of the parameters that it carries."""


@dataclass(frozen=True, kw_only=True)
class PhaseRan(Event):
    """A part of a training step ended; times are seconds since the epoch."""

    phase: str
    """forward, backward or step (the optimizer's)."""
    step: int
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """An optimizer step was left out because gradients were not finite."""

    step: int
    loss_scale: float
    num_skipped: int
    param: str | None = None
    """The first parameter, in the model's order, whose gradient was not finite."""
    rank: int | None = None
    """The first rank that holds such a gradient of it; after averaging often all do."""
    value: str | None = None
    """"nan" or "inf"."""
    loss_rank: int | None = None
    """The first rank whose own loss was not finite."""


# One list per process: autograd runs backward passes on threads of its own.
_listeners: list[Callable[[Event], None]] = []


def is_heard() -> bool:
    """Say whether a recorder is open: events that cost something to make need not be made else."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Hand an event to every open recorder."""
    for listen in tuple(_listeners):
        listen(event)


class Recorder:
    """Collect the events emitted inside a `with` block.

    Args:
        limit: keep the first ones only and count the rest (`num_dropped`); None keeps all.

    Example:
        >>> with Recorder() as rec:
        ...     emit(PassesSkipped(reason="demo"))
        >>> [e.to_dict()["kind"] for e in rec.events]
        ['PassesSkipped']
    """

    def __init__(self, limit: int | None = None) -> None:
        self.events: list[Event] = []
        self.num_dropped = 0
        self._limit = limit

    def __enter__(self) -> Recorder:  # noqa: PYI034  Self needs Python 3.11
        _listeners.append(self._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        _listeners.remove(self._listen)

    def _listen(self, event: Event) -> None:
        if self._limit is not None and len(self.events) >= self._limit:
            self.num_dropped += 1
        else:
            self.events.append(event)
