"""Typed events, for recorders.

Any room may emit events; rooms below do not know who listens. An event is a frozen record with a `kind`; a
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
    notes: tuple[str, ...] = ()
    """What the pass says of the graph: why it left something as it was, say."""
    compile_id: str | None = None
    """Dynamo's id of the compile that the pass was a part of."""
    before: str | None = None
    """Text of the graph before a pass that edited it."""
    after: str | None = None
    curve: tuple[int, ...] | None = None
    """Bytes alive after each node of the graph as the pass left it."""


@dataclass(frozen=True, kw_only=True)
class BodyWoven(Event):
    """Equal layers of a graph have become calls of one body, which is compiled once."""

    graph: str
    """The lowered graph that calls it."""
    name: str
    """How calls name it: the first argument of `torchloom.region` or `torchloom.region_backward`."""
    half: str
    """What these calls run: forward, backward or inference."""
    layers: tuple[str, ...]
    """For each call the module that it stands for, "" where none is known."""
    text: str
    """What it computes."""
    compile_id: str | None = None
    """Dynamo's id of the compile that it is a part of."""


@dataclass(frozen=True, kw_only=True)
class ProgramReady(Event):
    """A program that serves a range of sizes was built or loaded."""

    model: str
    origin: str
    """"built" or "loaded"."""
    key: str
    """The key of its entry in a store."""
    contract: str
    """The contract of its calls, as text."""
    seconds: float
    """Duration of building or loading."""
    boxes: tuple[str, ...]
    """The sizes that each of its variants is for."""
    num_calls: tuple[int, ...]
    """Number of graphs that run in a call of each variant."""
    num_graphs: int
    """Number of different graphs in all variants."""
    verdicts: tuple[str, ...]
    """The assumptions about sizes, each of which holds."""


@dataclass(frozen=True, kw_only=True)
class PassesSkipped(Event):
    """Weaving a graph failed; the model runs eagerly sharded."""

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
    """A plan for a captured graph was chosen."""

    graph: str
    plan: Mapping[str, object]
    """The fields of `torchloom.plan.GraphPlan`, decisions included."""
    planning_s: float
    """Time of all planning rounds; 0 if the plan came with cached code."""
    num_tries: int
    """How often the graph was compiled until its code kept the budget."""


@dataclass(frozen=True, kw_only=True)
class PlanReviewed(Event):
    """Ranks measured the operators of their graphs and decided whether that changes the plan."""

    step: int
    """Optimizer steps done before."""
    duration_s: float
    changes: bool


@dataclass(frozen=True, kw_only=True)
class PeakFound(Event):
    """The peak memory of a captured graph's forward and backward was predicted, with what is alive at the peak."""

    graph: str
    contents: Mapping[str, object]
    """The fields of `torchloom.memory.PeakContents`."""


@dataclass(frozen=True, kw_only=True)
class StandingFound(Event):
    """Standing memory, which stays on the device between forward and backward passes, was added up."""

    budget_bytes: int | None
    """The memory budget of the user; None without one."""
    base_bytes: int
    """All standing memory, on the rank that has most."""
    step_bytes: int
    """What the optimizer step adds."""
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
    """gather, reduce, sync, or exchange: between shards and owners of parameters."""
    num_tensors: int
    num_bytes: int
    """Bytes of the full tensors."""
    start_s: float
    wait_s: float
    """When the wait for it began. Work between `start_s` and `wait_s` overlapped with it."""
    end_s: float
    params: tuple[str, ...] = ()
    """Names of the parameters whose tensors it moves."""


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
    """An optimizer step was skipped because gradients were not finite."""

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


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """An optimizer step ended, applied or skipped. None stands for what is not known.

    The names of the fields are those of the metrics that `Engine.log_to` hands over: they stay.
    """

    step: int
    """Optimizer steps done, this one included; skipped ones count."""
    rank: int
    """The global rank that tells."""
    seconds: float
    """Wall time since the end of the step before. Of an engine's first step, since its forward began; of the
    first step of a loop without an engine, since `torchloom.compile`."""
    wait_seconds: float | None = None
    """Of `seconds`, the time before the first forward: waiting for data, evaluating, saving."""
    skipped: bool
    """Whether the step was skipped, because a gradient was not finite."""
    samples: int | None = None
    """Samples since the run began, over all ranks."""
    loss: float | None = None
    """Mean over all ranks and micro-steps of the loss that `backward` was given; None where no gradient norm
    is computed, whose collective carries it."""
    rank_loss: float | None = None
    """The same of this rank alone."""
    grad_norm: float | None = None
    """Global norm of the gradients before clipping; None if the step was skipped."""
    lr: float | None = None
    """The learning rate of the first parameter group that this step was taken with."""
    loss_scale: float | None = None
    """The factor of the loss in this step; None unless the loss is scaled (fp16)."""
    num_skipped: int | None = None
    """Steps skipped since the run began."""
    tokens: int | None = None
    """Tokens of this step over all ranks, padding included; None where batches hold no token ids, or `loss`
    is None."""
    rank_tokens: int | None = None
    """The same of this rank alone."""
    tokens_per_second: float | None = None
    """`tokens` over `seconds`."""
    mfu: float | None = None
    """Model FLOP utilization (`torchloom.loop.step_log`); None where the device's peak is not known."""
    peak_bytes: int | None = None
    """Most device memory that was allocated so far; on a CPU, resident memory of this process."""
    collectives: int | None = None
    """Collectives of parameters and gradients since the last step."""
    collective_bytes: int | None = None
    """Bytes of their whole tensors."""
    graphs: int | None = None
    """Graphs captured so far; 0 if nothing is compiled."""
    recompiles: int | None = None
    """Graphs captured during this step, although earlier steps had captured graphs."""
    predicted_peak_bytes: int | None = None
    """Peak of the device's memory by the plan; None without a plan."""
    measured_peak_bytes: int | None = None
    """The most that tensors held in a warm step, standing memory included; None until that step."""
    predicted_seconds: float | None = None
    """Time of all forward and backward passes of a step by the plan; None where a step may not run all plans."""

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the known numbers as floats by the names of their fields; True is 1.0.

        Args:
            prefix: put in front of each name, such as "train/".

        Example:
            >>> ended = StepEnded(step=7, rank=0, seconds=0.5, wait_seconds=0.1, skipped=False, loss=2.5)
            >>> ended.metrics("train/")["train/loss"]
            2.5
        """
        left_out = ("at_s", "step", "rank")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            f"{prefix}{name}": float(value)
            for name, value in values.items()
            if name not in left_out and value is not None
        }


@dataclass(frozen=True, kw_only=True)
class PlanCompared(Event):
    """A plan's prediction was compared with what warm steps needed, once for each plan."""

    step: int
    """The step after which it was compared."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    """Most that tensors held in one warm step, all that stays between steps included; on CUDA, bytes that were requested."""
    predicted_seconds: float | None
    """Time of all forward and backward passes of a step; None where one step may not run all graphs."""
    measured_seconds: float | None
    """The least of the warm steps that were measured; None of loops without an engine."""


# One list per process: autograd runs backward passes on threads of its own.
_listeners: list[Callable[[Event], None]] = []


def is_heard() -> bool:
    """Return whether a recorder is open. Check it before building events that are expensive to make."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Pass an event to every open recorder."""
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
