"""What torch.compile holds right now: the entries of a function.

Nothing here compiles, runs or resets anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torchloom._torch import introspect
from torchloom.inspect.live.guards import guards_of, resolve_lines
from torchloom.inspect.live.rewritten import continuations_of
from torchloom.inspect.live.target import entries_of, resumed, target_of
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.records import Continuation, Guard


class LiveEntry:
    """A compiled version of a function, as torch holds it: a pair of (guard, compiled code).

    Example:
        >>> guard, code = entries(compiled)[0]  # doctest: +SKIP
    """

    def __init__(
        self, raw: Any, depth: int, original: CodeType, namespace: Mapping[str, Any]
    ) -> None:
        # Keeps the function's code alive, and with it the memory that the guards are in.
        self._raw, self.depth, self._original = raw, depth, original
        self._namespace = namespace

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
        """The bytecode that runs in place of the function's own."""
        return self._raw.code

    @property
    def guard(self) -> LiveGuard:
        """The condition for using the entry."""
        return LiveGuard(self._raw.guard_manager, self._original)

    @property
    def source(self) -> str:
        """What the bytecode does, as readable pseudo-source."""
        return pseudo_source(self.code, self.function, original=self._original)

    @property
    def continuations(self) -> list[Continuation]:
        """The code behind its graph breaks, one for each branch, in the order of the calls."""
        return continuations_of(self.code, self._namespace)

    @property
    def original_bytecode(self) -> str:
        """The instructions that Python compiled from the source."""
        return bytecode_listing(self._original)

    @property
    def bytecode(self) -> str:
        """The instructions that Dynamo wrote and that run in their place."""
        return bytecode_listing(self.code, self._original)

    @property
    def is_live(self) -> bool:
        """Whether torch still holds the entry: a reset drops it."""
        held = introspect.cache_entries(self._original)
        return any(entry.code is self.code for entry in held)

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""
        return introspect.backend_name(self._raw)

    def __repr__(self) -> str:
        return f"<entry {self.compile_id} of {self.function}, {len(self.guard)} guards>"


class LiveGuard:
    """The guards of one entry."""

    def __init__(self, manager: Any, code: CodeType) -> None:
        self._manager, self._code = manager, code

    def records(self) -> list[Guard]:
        """Return every guard as data."""
        found = guards_of(self._manager)
        resolve_lines(found, self._code, introspect.interned_files().values())
        return found

    def __len__(self) -> int:
        return len(self.records())

    def __str__(self) -> str:
        return "\n".join(guard.english for guard in self.records())


def entries(fn: Any, *, resume: bool = False) -> list[LiveEntry]:
    """Return the entries that torch.compile holds for a function, the oldest first.

    Args:
        fn: what torch.compile returned, the function it was given, a module, or a method.
        resume: include the entries of the code behind graph breaks.

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
        live = [
            LiveEntry(raw, depth, code, target.fn.__globals__) for raw in entries_of(target, code)
        ]
        found += sorted(live, key=lambda entry: sort_key(entry.compile_id))
    return found


def sort_key(compile_id: str) -> tuple[int, ...]:
    """Return a key that sorts compile ids by age: 0/2 before 0/10."""
    return tuple(int(part) for part in compile_id.split("/") if part.isdigit())
