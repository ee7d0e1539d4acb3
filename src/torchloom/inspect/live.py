"""What torch.compile holds right now: the entries of a function, and which of them a call would hit.

Nothing here compiles, runs or resets anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from torchloom._torch import introspect
from torchloom.inspect.english import source_in_words, without_addresses
from torchloom.inspect.guards import guards_of
from torchloom.inspect.pseudo import pseudo_source
from torchloom.inspect.target import frame_locals, resumed, target_of
from torchloom.records import Guard


class LiveEntry:
    """A compiled version of a function, as torch holds it: a pair of (guard, compiled code).

    Example:
        >>> guard, code = entries(compiled)[0]  # doctest: +SKIP
    """

    def __init__(self, raw: Any, depth: int, original: CodeType) -> None:
        self._raw, self.depth, self._original = raw, depth, original

    def __iter__(self) -> Iterator[Any]:
        """Unpack as (guard, compiled code)."""
        return iter((self.guard, self.code))

    @property
    def compile_id(self) -> str:
        """Dynamo's id, e.g. "0/1": frame and version."""
        return str(self._raw.compile_id)

    @property
    def function(self) -> str:
        """Name of the function, or of its rest after a graph break."""
        return self._original.co_name

    @property
    def code(self) -> CodeType:
        """The bytecode that runs instead of the function's."""
        return self._raw.code

    @property
    def guard(self) -> LiveGuard:
        """The condition for using the entry."""
        return LiveGuard(self._raw.guard_manager)

    @property
    def source(self) -> str:
        """What the bytecode does, as readable pseudo-source."""
        return pseudo_source(self.code, self.function)

    @property
    def backend(self) -> str:
        """What compiled it."""
        return introspect.backend_name(self._raw)

    def __repr__(self) -> str:
        return f"<entry {self.compile_id} of {self.function}, {len(self.guard)} guards>"


class LiveGuard:
    """The guards of one entry."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def records(self) -> list[Guard]:
        """Return every guard as data."""
        return guards_of(self._manager)

    def __len__(self) -> int:
        return len(self.records())

    def __str__(self) -> str:
        return "\n".join(guard.english for guard in self.records())


class Miss(NamedTuple):
    """Why an entry does not serve a call."""

    compile_id: str
    source: str
    """The value that differs, as Dynamo writes it."""
    text: str
    """The check that failed."""
    english: str


class CallReport(NamedTuple):
    """What a call would do."""

    hit: str | None
    """Compile id of the entry that would serve it."""
    hits: tuple[str, ...]
    """All entries whose guards hold; the first one serves."""
    misses: tuple[Miss, ...]
    num_entries: int
    limit: int
    """How many entries Dynamo keeps before it stops compiling the function."""

    @property
    def action(self) -> str:
        """ "hit", "compile", "recompile" or "eager": over the limit nothing is compiled any more."""
        if self.hit is not None:
            return "hit"
        if self.num_entries >= self.limit:
            return "eager"
        return "recompile" if self.num_entries else "compile"

    def __str__(self) -> str:
        lines = {
            "hit": f"would use entry {self.hit}",
            "compile": "would compile: nothing has been compiled yet",
            "recompile": f"would recompile: {self.num_entries} of {self.limit} entries, none fits",
            "eager": f"would run eagerly: the limit of {self.limit} entries is reached, none fits",
        }
        rows = [lines[self.action]]
        rows += [f"  entry {miss.compile_id}: {miss.english}" for miss in self.misses]
        return "\n".join(rows)


def entries(fn: Any, *, resume: bool = False) -> list[LiveEntry]:
    """Return the entries that torch.compile holds for a function, the oldest first.

    Args:
        fn: what torch.compile returned, the function it was given, a module, or a method.
        resume: also those of the pieces behind graph breaks.

    Raises:
        InspectError: there is no Python function behind `fn`.

    Example:
        >>> compiled = torch.compile(lambda x: x + 1, backend="eager")
        >>> len(entries(compiled))
        0
    """
    target = target_of(fn)
    found = []
    for depth, code in resumed(target):
        if depth and not resume:
            continue
        # Dynamo keeps the most recently used entry in front.
        live = [LiveEntry(raw, depth, code) for raw in introspect.cache_entries(code)]
        found += sorted(live, key=lambda entry: _sort_key(entry.compile_id))
    return found


def explain_call(fn: Any, *args: Any, **kwargs: Any) -> CallReport:
    """Say what a call with these arguments would do, without compiling or running anything.

    Guards on global state (grad mode, autocast) are checked as it is now: call this where the
    function would be called.

    Raises:
        InspectError: there is no Python function behind `fn`, or the arguments do not fit it.

    Example:
        >>> explain_call(torch.compile(lambda x: x + 1), 3).action
        'compile'
    """
    target = target_of(fn)
    values = frame_locals(target, args, kwargs)
    hits: list[str] = []
    misses: list[Miss] = []
    raws = introspect.cache_entries(target.code)
    for raw in raws:
        failure = introspect.guard_failure(raw, values)
        if failure is None:
            hits.append(str(raw.compile_id))
        else:
            misses.append(_miss(str(raw.compile_id), failure))
    misses.sort(key=lambda miss: _sort_key(miss.compile_id))
    return CallReport(
        hit=hits[0] if hits else None,
        hits=tuple(hits),
        misses=tuple(misses),
        num_entries=len(raws),
        limit=introspect.recompile_limit(),
    )


def _miss(compile_id: str, failure: str) -> Miss:
    text = failure.partition("  #")[0].strip()
    english = without_addresses(text)
    quoted = re.match(r"tensor '(.+?)' ", text)
    source = quoted.group(1) if quoted else _source_in(text)
    if quoted:
        english = f"{source_in_words(source)}: {english[quoted.end() :]}"
    elif source:
        english = english.replace(source, source_in_words(source))
    return Miss(compile_id, source, text, english)


def _source_in(text: str) -> str:
    """Return the first source expression in the text of a failed guard."""
    start = min((i for i in (text.find("L["), text.find("G[")) if i >= 0), default=-1)
    if start < 0:
        return ""
    depth, end = 0, start
    while end < len(text):
        char = text[end]
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif depth == 0 and not (char.isalnum() or char in "._"):
            break
        end += 1
    return text[start:end]


def _sort_key(compile_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in compile_id.split("/") if part.isdigit())
