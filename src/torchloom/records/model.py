"""The records of functions and of a session.

As in `entry` and `memory`, every field is a number, a text, or a list or dict of these: no tensor, no address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torchloom.records.entry import Break, Entry
from torchloom.records.memory import GraphPlan, Peak, Standing


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
