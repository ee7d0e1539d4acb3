"""Records of a run's memory: what stands between steps, what is alive at a peak, what was planned."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Alive:
    """Bytes of one kind in one layer."""

    kind: str
    """parameters, master copies, optimizer states, buffers, gradients, gathered weights, activations,
    communication or workspace."""
    layer: str
    """The module's path, "" where none is known."""
    num_bytes: int
    num_values: int = 0
    """Of how many tensors; 0 where they were not counted."""


@dataclass(kw_only=True, slots=True)
class Peak:
    """The highest sum of what forward and backward of a graph allocate, as it was predicted."""

    graph: str
    phase: str
    """forward or backward."""
    node: str
    """The operator that runs at the peak."""
    layer: str
    peak_bytes: int
    """Of the graphs as the passes left them; what a compiler makes of them: `GraphPlan.peak_bytes`."""
    alive: list[Alive] = field(default_factory=list)
    """What is alive then; adds up to the peak."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """Device memory that lives on between forwards and backwards."""

    budget_bytes: int | None
    """What the user gave for everything."""
    base_bytes: int
    """All of it, on the rank that has most, with a reserve for what is not planned."""
    step_bytes: int
    """What the optimizer's step adds."""
    parts: list[Alive] = field(default_factory=list)
    """Of this rank."""


@dataclass(kw_only=True, slots=True)
class Decision:
    """What a plan does with one value between forward and backward."""

    value: str
    op: str
    num_bytes: int
    action: str
    """keep, recompute, offload or unused."""
    cost_us: float
    """Time of computing this one again."""
    where: str = ""


@dataclass(kw_only=True, slots=True)
class GraphPlan:
    """What was planned for one captured graph, and the figures that it rests on; times per run."""

    graph: str
    planning_s: float
    num_tries: int
    """How often the graph was compiled until code kept the budget well; 0: it came from a cache."""
    budget_bytes: int | None
    """What forward and backward may add; None: no bound."""
    peak_bytes: int
    """Predicted for the code that the compiler wrote."""
    graph_peak_bytes: int
    """Predicted for the graphs that the compiler was given."""
    saved_bytes: int
    batch_bytes: int
    min_peak_bytes: int
    """The least that any plan found needs."""
    compute_us: float
    measured_us: float
    """Of compute, the time of operators that were measured on this machine."""
    extra_us: float
    """Of what backward computes again."""
    overhead_us: float
    """What collectives and copies add."""
    copy_us: float
    states_us: float
    bound_us: float
    """No plan within the budget adds less than this to compute."""
    resident: dict[str, int] = field(default_factory=dict)
    """Bytes of the weights that stay gathered from step to step, by parameter."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Bytes of shards that stay on the device though they could wait on the host."""
    prefetch_bytes: int | None = None
    bucket_bytes: int | None = None
    decisions: list[Decision] = field(default_factory=list)
    """The biggest first."""
