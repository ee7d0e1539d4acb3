"""One compile of Dynamo, or the attempt at one, while its record is put together; the files that the trace names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torchloom._torch import compiling, introspect
from torchloom.inspect.collected import Rewriting
from torchloom.inspect.live.guards import is_library, resolve_lines
from torchloom.inspect.live.target import Named
from torchloom.inspect.wording.english import guard_in_words, without_addresses
from torchloom.inspect.wording.hider import Hider
from torchloom.records import Entry, Guard

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
    guard_rows: list[Mapping[str, Any]] = field(default_factory=list)
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


class Places:
    """Resolves the file names of one watch.

    Args:
        files: names by their number in the trace; the reader of the trace adds to them.
        hider: notes the keys that guards name.
    """

    def __init__(self, files: dict[int, str], hider: Hider) -> None:
        self.files, self._hider = files, hider

    def of(self, frame: Mapping[str, Any]) -> tuple[str, int]:
        """Return file and line of a frame as torch logs it."""
        number = frame.get("filename")
        path = self.files.get(number, str(number)) if isinstance(number, int) else str(number)
        return path, int(frame.get("line") or 0)

    def add_user_lines(self, compile_: Compile) -> None:
        """Add to each guard of an entry the line of user code that made it.

        An entry whose live guards are gone gets the guards from the trace.
        """
        entry = compile_.entry
        lines: dict[str, str] = {}
        texts: dict[str, str] = {}
        for row in compile_.guard_rows:
            code = self._hider.check(str(row.get("code", "")))
            text = without_addresses(code)
            texts[text] = code
            places = [self.of(frame) for frame in row.get("user_stack") or []]
            user = [f"{file}:{line}" for file, line in places if not is_library(file)]
            if user:
                lines[text] = user[-1]
        if not entry.guards:
            entry.guards = [
                Guard(source="", kind="", text=text, english=guard_in_words("", "", code))
                for text, code in texts.items()
            ]
        resolve_lines(entry.guards, compile_.code, self.files.values(), lines)


def user_stack(compile_: Compile) -> list[str]:
    """Return the user's frames that led to a compile, as `file:line in function`, the compiled function last if it is one of these."""
    calls = [call for call in compile_.calls if not is_library(call[0])]
    if compile_.code is not None:
        file, line = introspect.place_of(compile_.code)
        calls += [] if is_library(file) else [(file, line, compile_.code.co_name)]
    return [f"{file}:{line} in {name}" for file, line, name in calls]
