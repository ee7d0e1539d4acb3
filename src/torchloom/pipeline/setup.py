"""What a compile session is told for all of its graphs, and the key under which their code is cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torchloom.backends.graphs import name_of
from torchloom.capture import Recordings
from torchloom.deepcompile.site import Book
from torchloom.graph import GraphPass, PassContext, digest_of
from torchloom.pipeline.keys import identity_of, is_built_in, sources_digest
from torchloom.pipeline.report import CompilePhase, CompileReport, log_phase
from torchloom.plan import Planner

Tell = Callable[[str, str, str], None]
"""Called with a graph's key, its outcome (equal on all ranks that compile it), and that in words."""


@dataclass(eq=False)  # Dynamo compares backends to tell compiled entries apart
class CompileSetup:
    """What weaving a graph, and the key that its code is cached under, need of a compile session."""

    passes: Sequence[GraphPass]
    context: PassContext
    backend: str | Callable[..., Any] = "inductor"
    """"inductor", "aot_eager", "eager", or any registered name or callable."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings."""
    regions: bool = True
    """Compile equal layers once, as one body."""
    strict: bool = False
    """Raise when weaving fails, instead of running eagerly."""
    regather: bool = False
    """Whether a graph that fell back saves shards for backward, not gathered weights (stage 3)."""
    dump_dir: Path | None = None
    """Folder for the text of each graph before and after each pass; passes then always run."""
    announce: bool = True
    """Whether this rank says in the log that a graph fell back."""
    tell_phases_every_s: float | None = None
    """Seconds after which the log says what a compile is busy with, again and again; None: never."""
    debug_log: bool = False
    """Log each pass, not only when debugging."""
    tell: Tell | None = None
    planner: Planner | None = None
    """Chooses what backward computes again; None leaves it to torch's partitioner."""
    backward_at_once: bool = False
    """Whether backward is compiled with forward, before anything runs: a simulation runs nothing."""
    recordings: Recordings | None = None
    """Holds the CUDA graphs of the compiled code; None: nothing is recorded."""
    book: Book = field(default_factory=Book)
    """What custom passes are told of the model and of all graphs."""
    report: CompileReport = field(default_factory=CompileReport)
    round: int = 1
    """Number of the compile of the module that is under way or was the last."""
    _phase_end: threading.Event = field(default_factory=threading.Event)
    """Ends what the log says of the phase now."""

    def tell_phase(self, name: str, graph: str) -> None:
        """Note what a compile is busy with; see `CompileReport.phase`."""
        self._phase_end.set()
        self.report.phase = CompilePhase(name, graph, time.monotonic()) if name else None
        if self.report.phase is not None and self.tell_phases_every_s is not None:
            self._phase_end = log_phase(self.report.phase, self.tell_phases_every_s)

    def key(self, planned: str) -> str:
        """Return a hash of all that woven graphs depend on besides the captured graph.

        Args:
            planned: what plans depend on.
        """
        passes = [identity_of(each).text for each in self.passes]
        text = f"{sources_digest()}|{passes}|{self.context.key()}|{planned}|{self.regions}|{self.recordings is not None}"
        return digest_of(text, 32)

    @cached_property
    def common_key(self) -> str:
        """Equal on ranks that weave the same, whatever each has captured so far."""
        return self.key("" if self.planner is None else self.planner.common_key)

    @property
    def round_key(self) -> str:
        """Equal on ranks that compile the same: passes and facts, and the number of compiles so far."""
        return f"{self.common_key} {self.round}"

    @property
    def facts(self) -> dict[str, object]:
        """The parts of the key by name, so that ranks can name those that differ."""
        settings = [f.name for f in fields(self.context) if f.name not in ("choices", "params")]
        return {
            "passes": [each.name for each in self.passes],
            "backend": name_of(self.backend),
            "strict": self.strict,
            "regions": self.regions,
            "cuda_graphs": self.recordings is not None,
            **{f"pass {p.name}": identity_of(p).text for p in self.passes if not is_built_in(p)},
            **{f"setting {name}": str(getattr(self.context, name)) for name in settings},
            **{
                f"option {name} of pass {each.name}": repr(value)
                for each in self.passes
                for name, value in each.options
            },
            "everything else": self.common_key,
        }
