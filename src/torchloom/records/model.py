"""The records of functions, of a run's memory and of a session.

As in `entry`, every field is a number, a text, or a list or dict of these: no tensor, no address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchloom.records.entry import Break, Entry


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


@dataclass(kw_only=True, slots=True)
class Function:
    """A Python function that Dynamo met, or the continuation of one behind a graph break."""

    name: str
    """Qualified from the innermost function on: `Block.forward`; see `qualname`."""
    file: str
    line: int
    qualname: str = ""
    """As Python names it: `build.<locals>.Block.forward`."""
    source: str = ""
    """The function's text, where the file could be read."""
    frame_id: int | None = None
    epoch: int = 0
    entries: list[Entry] = field(default_factory=list)
    children: list[Function] = field(default_factory=list)
    """Resume functions, in the order of their lines."""
    breaks: list[Break] = field(default_factory=list)
    """Graph breaks that left no entry, because Dynamo skipped the frame."""
    num_hits: int = 0
    num_misses: int = 0
    """Calls that fitted no entry and for which Dynamo compiled, or tried to."""
    num_eager_calls: int = 0
    """Calls that fitted no entry and ran eagerly because Dynamo no longer compiles the function."""
    recompile_limit: int | None = None
    """The recompile limit, if it was reached during the watch."""
    skipped: str | None = None
    """Why Dynamo runs it eagerly, always or for calls that no entry fits; or None."""

    def walk(self) -> Iterator[Function]:
        """Yield this function and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(kw_only=True, slots=True)
class EventRow:
    """One event of torchloom, as data."""

    kind: str
    at_s: float
    data: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Session:
    """Everything that one watch recorded on one rank."""

    torchloom: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""
    device: str = ""
    rank: int = 0
    world_size: int = 1
    started_at_s: float = 0.0
    duration_s: float = 0.0
    num_resets: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    """Settings of Dynamo and Inductor that are not at their defaults."""
    functions: list[Function] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Messages that belong to no particular function."""
    events: list[EventRow] = field(default_factory=list)
    plans: list[GraphPlan] = field(default_factory=list)
    """Plans of the graphs that were compiled under a budget, in order; a later plan replaces earlier ones of the
    same graph."""
    peaks: list[Peak] = field(default_factory=list)
    """Peaks of the woven graphs, in order."""
    standing: list[Standing] = field(default_factory=list)
    """One for each engine that was compiled during the watch."""
    num_unknown_eager_calls: int = 0
    """Calls over a recompile limit, or in run-only mode, whose function is not known."""
    overhead: dict[str, float] = field(default_factory=dict)
    """Milliseconds that the watch itself took, and counts of what it dropped."""

    def all_functions(self) -> Iterator[Function]:
        """Yield every function, resume functions included."""
        for function in self.functions:
            yield from function.walk()

    def entries(self) -> Iterator[Entry]:
        """Yield every entry of every function."""
        for function in self.all_functions():
            yield from function.entries

    def breaks(self) -> list[Break]:
        """Return the distinct places where graphs ended."""
        found: dict[tuple[str, str], Break] = {}
        for function in self.all_functions():
            for each in [*function.breaks, *(b for e in function.entries for b in e.breaks)]:
                found.setdefault((each.gb_type or each.reason, each.place), each)
        return list(found.values())

    @property
    def num_recompiles(self) -> int:
        """Entries that torch made because older ones, also from before the watch, did not fit."""
        return sum(
            # What torch said of an entry is known by its metrics; without them, by its place.
            entry.is_recompile or (index > 0 and not entry.metrics.get("forward"))
            for function in self.all_functions()
            for index, entry in enumerate(function.entries)
        )

    @property
    def num_eager_calls(self) -> int:
        """Calls that fitted no entry and ran eagerly, for example over the recompile limit."""
        return self.num_unknown_eager_calls + sum(f.num_eager_calls for f in self.all_functions())

    def __getitem__(self, name: str) -> Function:
        """Return the function of this name.

        Raises:
            KeyError: nothing of this name was compiled, or several functions share it; the message
                lists them.
        """
        every = list(self.all_functions())
        found = [f for f in every if name in (f.name, f.qualname)]
        found = found or [f for f in every if f.name.endswith(f".{name}")]
        places = {(f.file, f.line, f.name): f for f in reversed(found)}
        if len(places) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{name} ({file}:{line})" for file, line, name in sorted(places))
            raise KeyError(f"several functions are called {name!r}: {several}")
        known = ", ".join(sorted({f.name for f in every})) or "nothing"
        raise KeyError(f"no function {name!r} was compiled while watching; compiled: {known}")


def eager_reason(function: Function | None) -> str:
    """Return why a function, or calls of it, ran eagerly; empty if nothing was lost.

    A function without anything to compile loses nothing.
    """
    if function is None:
        return ""
    skipped = function.skipped or ""
    is_loss = function.num_eager_calls or function.entries or skipped.startswith("failed")
    return skipped if is_loss else ""


def eager_calls(session: Session) -> list[str]:
    """Return a line for each function with calls that fitted no entry and ran eagerly."""
    lines = [
        f"{function.name} ({function.file}:{function.line}): {function.skipped}"
        for function in session.all_functions()
        if function.num_eager_calls
    ]
    if session.num_unknown_eager_calls:
        lines.append(f"{session.num_unknown_eager_calls} of functions that could not be told")
    return lines


def given_up(session: Session) -> list[str]:
    """Return a line for each function that torch does not compile, where no graph break says so."""
    return [
        f"{function.name} ({function.file}:{function.line}): {function.skipped}"
        for function in session.all_functions()
        if eager_reason(function) and not function.num_eager_calls and not function.breaks
    ]
