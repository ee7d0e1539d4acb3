"""One compile of Dynamo, or the attempt at one, while its record is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torchloom._torch import compiling, introspect
from torchloom.inspect.collected import Rewriting
from torchloom.inspect.live.guards import is_library
from torchloom.inspect.live.target import Named
from torchloom.records import Entry

CompileKey = tuple[int, int, int]
"""(epoch, frame id, version)."""


@dataclass
class Compile:
    """One compile, or the attempt at one."""

    key: CompileKey
    entry: Entry
    """The record of the entry that it makes."""
    code: CodeType | None = None
    """The code object that was to be compiled."""
    rewritten: Rewriting | None = None
    wrapped: Named | None = None
    """The callable, where torch compiles it through a wrapper function of its own."""
    hit_limit: bool = False
    """Whether the recompile limit ended it."""
    calls: Sequence[tuple[str, int, str]] = ()
    """File, line and function of all that led to it."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """The sizes of the tensors in the call, by source."""

    @property
    def has_failed(self) -> bool:
        """Whether no entry was made because of an error."""
        return self.entry.status.startswith("failed") or bool(self._metrics.get("fail_type"))

    @property
    def is_entry(self) -> bool:
        """Whether torch keeps, or kept, an entry.

        Of a function without operators Dynamo makes no entry: it marks the function to be skipped. The
        capture of a whole graph, as for serving, writes no bytecode.
        """
        if self.has_failed:
            return False
        return self.rewritten is not None or bool(self.entry.artifacts)

    @property
    def continuations(self) -> Sequence[tuple[str, CodeType]]:
        """Global name and code of each continuation behind its graph breaks."""
        return () if self.rewritten is None else self.rewritten.continuations

    @property
    def continues(self) -> CodeType | None:
        """The function that the code continues behind a graph break."""
        if self.rewritten is not None:
            return self.rewritten.continues
        return None if self.code is None else compiling.continued_code(self.code)

    @property
    def _metrics(self) -> Mapping[str, Any]:
        return self.entry.metrics.get("forward", {})


def user_stack(compile_: Compile) -> list[str]:
    """Return the user's frames that led to a compile, as `file:line in function`, the compiled function last if it is one of these."""
    calls = [call for call in compile_.calls if not is_library(call[0])]
    if compile_.code is not None:
        file, line = introspect.place_of(compile_.code)
        calls += [] if is_library(file) else [(file, line, compile_.code.co_name)]
    return [f"{file}:{line} in {name}" for file, line, name in calls]
