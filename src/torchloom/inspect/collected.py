"""What the hooks of a watch collected: `listen` makes it, `record` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from torchloom import events
from torchloom.inspect.live.target import Named

_LIMIT_ERRORS = ("Unsupported", "FailOnRecompileLimitHit")


class Row(NamedTuple):
    """One record of torch's structured trace."""

    kind: str
    """The record's kind, or the name of an artifact."""
    body: Any
    payload: str | None
    frame_id: int | None
    frame_compile_id: int | None
    attempt: int
    epoch: int = 0
    """How often `torch._dynamo.reset()` was called before, where that is known."""
    code: CodeType | None = None
    """What is being compiled, with the kinds that begin a compile."""
    calls: Sequence[tuple[str, int, str]] = ()
    """File, line and function of the frames that led to a compile, with the kind that begins it."""
    warm_guards_us: float | None = None
    """Microseconds of one check of the guards that were just built, with the kind that prints them."""
    wrapped: Named | None = None
    """The callable inside torch's wrapper function, with the kinds that begin a compile."""

    @property
    def is_limit(self) -> bool:
        """Whether it says that a frame has hit the recompile limit."""
        return (
            self.kind == "compilation_metrics"
            and isinstance(self.body, dict)
            and self.body.get("fail_type") in _LIMIT_ERRORS
            and self.body.get("co_name") is None  # refused before tracing began
        )


class Rewriting(NamedTuple):
    """One code object as Dynamo rewrote it."""

    compile_id: str
    original: CodeType
    transformed: CodeType
    epoch: int
    """How often Dynamo had been reset."""
    continues: CodeType | None
    """The function that `original` continues behind a graph break; None if it is no continuation."""
    continuations: tuple[tuple[str, CodeType], ...]
    """Global name and code of each continuation behind a graph break, in the order of the calls."""
    wrapped: Named | None = None
    traced: tuple[CodeType, ...] = ()
    """The functions that were inlined, where torch lists them."""


@dataclass(frozen=True)
class EagerCalls:
    """Calls that ran eagerly because no entry fitted, by epoch and code object."""

    counts: Mapping[tuple[int, CodeType], int] = field(default_factory=dict)
    limited: Mapping[tuple[int, CodeType], int] = field(default_factory=dict)
    """What hit the recompile limit while watched, and the limit."""
    num_unknown: int = 0
    """Calls whose function could not be found from the frame that called it."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Everything that the hooks of one watch have collected."""

    rows: Sequence[Row] = ()
    """The trace, in order."""
    rewritings: Sequence[Rewriting] = ()
    num_hits: Mapping[str, int] = field(default_factory=dict)
    """Calls by the global name of an entry's graph."""
    events: Sequence[events.Event] = ()
    """Events of torchloom, in order."""
    eager: EagerCalls = field(default_factory=EagerCalls)
    num_lookups: int = 0
    """How often Dynamo looked for an entry, including calls of functions that were compiled before."""
    num_resets: int = 0
    started_at_s: float = 0.0
    """Wall clock, in seconds since the epoch."""
    duration_s: float = 0.0
    listening_ms: float = 0.0
    """Milliseconds spent in keeping the trace."""
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """How many events and texts were dropped because a limit was reached, by kind."""
