"""Entries of a function under `torchloom.jit`: a guard that you can call, and code that you can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from torchloom._torch import dispatch, introspect
from torchloom.errors import InspectError
from torchloom.inspect.live.guards import guards_of
from torchloom.inspect.live.rewritten import continuations_of
from torchloom.inspect.live.target import TargetFunction, frame_locals
from torchloom.inspect.pseudo import pseudo_source
from torchloom.inspect.wording.expression import expression
from torchloom.inspect.wording.miss import miss_of
from torchloom.records import Continuation


class CompiledEntry:
    """One compiled version of a function: a guard, and the code that runs when the guard holds."""

    def __init__(self, guard: EntryGuard, code: CompiledCode) -> None:
        self.guard, self.code = guard, code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run this entry's code with the function's arguments.

        Raises:
            InspectError: the guard does not hold, so the code would compute something else than the
                function. `entry.code(...)` runs it regardless.
        """
        failure = self.guard.failure(*args, **kwargs)
        if failure is not None:
            raise InspectError(f"this entry does not serve such a call: {failure}")
        return self.code(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as (guard, code)."""
        return iter((self.guard, self.code))

    def __repr__(self) -> str:
        return f"if {self.guard.brief()}:\n    {self.code.expression}"


class EntryGuard:
    """The condition for using an entry. Call it with the function's arguments: it returns a bool."""

    def __init__(self, raw: Any, target: TargetFunction) -> None:
        self._raw, self._target = raw, target

    def __call__(self, /, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call with these arguments fits this entry."""
        return self.failure(*args, **kwargs) is None

    def failure(self, /, *args: Any, **kwargs: Any) -> str | None:
        """Return the check that a call with these arguments fails, in words; None if the guard holds."""
        values = frame_locals(self._target, args, kwargs)
        if introspect.is_invalid(self._raw.guard_manager):
            return "what it was compiled for is gone"
        failure = introspect.guard_failure(self._raw, values)
        return None if failure is None else miss_of(str(self._raw.compile_id), failure).english

    def __str__(self) -> str:
        return "\n".join(guard.english for guard in guards_of(self._raw.guard_manager))

    def brief(self) -> str:
        """Return the guards about arguments, on one line."""
        about = [
            guard.english
            for guard in guards_of(self._raw.guard_manager)
            if guard.source.startswith("L[")
        ]
        return " and ".join(about) or "always"


class CompiledCode:
    """What an entry runs: the rewritten bytecode and the graphs that it calls."""

    def __init__(self, raw: Any, graphs: Sequence[fx.GraphModule], fn: FunctionType) -> None:
        self.bytecode = raw.code
        """The code object that runs."""
        self.graphs, self._fn = tuple(graphs), fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the code without checking its guard. Code behind a graph break is still chosen by guards."""
        fn = self._fn
        own = FunctionType(
            self.bytecode, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
        )
        own.__kwdefaults__ = fn.__kwdefaults__
        return dispatch.run_only(own)(*args, **kwargs)

    @property
    def original(self) -> CodeType:
        """The code object that Python compiled from the source."""
        return self._fn.__code__

    @property
    def continuations(self) -> list[Continuation]:
        """The code behind its graph breaks, one for each branch, in the order of the calls."""
        return continuations_of(self.bytecode, self._fn.__globals__)

    @property
    def source(self) -> str:
        """Readable pseudo-source of the bytecode and of each continuation behind its graph breaks."""
        own = pseudo_source(self.bytecode, self._fn.__name__, original=self.original)
        behind = (
            each.source.replace(f"def {each.function}(", f"def {each.name}(", 1)
            for each in self.continuations
        )
        return "\n\n".join([own, *behind])

    @property
    def expression(self) -> str:
        """The graph's result as one expression of its inputs, e.g. `2 * x`."""
        if not self.graphs:
            return "no graph before its graph break"
        return "; ".join(expression(gm.graph) for gm in self.graphs)

    def __str__(self) -> str:
        graphs = "\n".join(gm.print_readable(print_output=False) for gm in self.graphs)
        return f"{self.source}\n{graphs}"
