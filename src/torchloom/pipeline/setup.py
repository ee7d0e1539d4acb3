"""What weaving a graph, and the key that its code is cached under, need of a compile session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchloom.deepcompile.site import Book
from torchloom.graph import GraphPass, PassContext
from torchloom.pipeline.second_plan import SecondPlan
from torchloom.plan import Planner


class Setup(Protocol):
    """What weaving a graph needs of its session."""

    passes: Sequence[GraphPass]
    context: PassContext
    backend: str | Callable[..., Any]
    dump_dir: Path | None
    debug_log: bool
    options: Mapping[str, Any]
    strict: bool
    regions: bool
    backward_at_once: bool
    planner: Planner | None
    trial: SecondPlan | None
    book: Book
    tell: Callable[[str, str, str], None] | None

    def tell_phase(self, name: str, graph: str) -> None:
        """Take what a compile is busy with, "" for nothing, and the graph that it is about."""
        ...

    @property
    def round_key(self) -> str:
        """Identifies one compile of the module."""
        ...
