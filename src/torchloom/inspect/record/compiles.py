"""One compile of Dynamo, or the attempt at one, while its record is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torchloom._torch import compiling
from torchloom.inspect.heard import Rewriting
from torchloom.inspect.live.naming import Named
from torchloom.records import Entry

CompileKey = tuple[int, int, int]
"""(epoch, frame id, version)."""


@dataclass
class Compile:
    """One compile, or the attempt at one."""

    key: CompileKey
    entry: Entry
    """What becomes of it, if it becomes an entry."""
    code: CodeType | None = None
    """What was to be compiled."""
    rewritten: Rewriting | None = None
    wrapped: Named | None = None
    """What is compiled, where that is no function but one of torch's own calls it."""
    hit_limit: bool = False
    """Whether the recompile limit ended it."""
    stack: list[Mapping[str, Any]] = field(default_factory=list)
    """The frames that led to it, as torch logs them."""
    calls: Sequence[tuple[str, int, str]] = ()
    """File, line and function of all that led to it."""
    guard_rows: list[Mapping[str, Any]] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    """The sizes that came, by source."""

    @property
    def has_failed(self) -> bool:
        """Whether no entry was made because of an error."""
        return self.entry.status.startswith("failed") or bool(self._metrics.get("fail_type"))

    @property
    def is_entry(self) -> bool:
        """Whether torch keeps, or kept, an entry.

        Functions without operators are compiled to nothing: Dynamo marks them to be left alone. The
        capture of a whole graph, as for serving, writes no code.
        """
        if self.has_failed:
            return False
        return self.rewritten is not None or bool(self.entry.artifacts)

    @property
    def continues(self) -> CodeType | None:
        """The function that the code goes on with behind a graph break."""
        if self.rewritten is not None:
            return self.rewritten.continues
        return None if self.code is None else compiling.continued_code(self.code)

    @property
    def _metrics(self) -> Mapping[str, Any]:
        return self.entry.metrics.get("forward", {})
