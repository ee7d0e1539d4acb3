"""Records of a run's memory: standing memory between steps, what is alive at a peak, plans."""

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
    """Number of tensors; 0 where they were not counted."""


@dataclass(kw_only=True, slots=True)
class Peak:
    """The predicted peak of what forward and backward of a graph allocate."""

    graph: str
    phase: str
    """forward or backward."""
    node: str
    """The operator that runs at the peak."""
    layer: str
    peak_bytes: int
    """Predicted for the graphs after the passes; `GraphPlan.peak_bytes` is that of the compiler's code."""
    alive: list[Alive] = field(default_factory=list)
    """What is alive at the peak; the parts add up to it."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """Device memory that stays allocated between forward and backward passes."""

    budget_bytes: int | None
    """The memory budget of the user; None without one."""
    base_bytes: int
    """All standing memory of the rank that has most, plus a reserve for what is not planned."""
    step_bytes: int
    """What the optimizer step adds."""
    parts: list[Alive] = field(default_factory=list)
    """The parts on this rank."""


@dataclass(kw_only=True, slots=True)
class Decision:
    """What a plan does with one value between forward and backward."""

    value: str
    op: str
    num_bytes: int
    action: str
    """keep, recompute, offload or unused."""
    cost_us: float
    """Microseconds of recomputing this value."""
    where: str = ""


@dataclass(kw_only=True, slots=True)
class GraphPlan:
    """The plan of one captured graph, and the figures it is based on; times are per run of the graph."""

    graph: str
    planning_s: float
    num_tries: int
    """How often the graph was compiled until its code kept the budget; 0 if it came from a cache."""
    budget_bytes: int | None
    """What forward and backward may allocate; None for no bound."""
    peak_bytes: int
    """Predicted for the code that the compiler wrote."""
    graph_peak_bytes: int
    """Predicted for the graphs that the compiler was given."""
    saved_bytes: int
    batch_bytes: int
    min_peak_bytes: int
    """The lowest peak of any plan that was found."""
    compute_us: float
    measured_us: float
    """The part of `compute_us` that was measured on this machine."""
    extra_us: float
    """Time of what backward recomputes."""
    overhead_us: float
    """Time that collectives and copies add to compute."""
    copy_us: float
    states_us: float
    bound_us: float
    """No plan within the budget adds less than this to compute."""
    resident: dict[str, int] = field(default_factory=dict)
    """Bytes of the weights that stay gathered from step to step, by parameter."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Bytes of shards that stay on the device although they could be kept on the host."""
    prefetch_bytes: int | None = None
    bucket_bytes: int | None = None
    decisions: list[Decision] = field(default_factory=list)
    """The largest value first."""
