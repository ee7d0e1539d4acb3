"""`torchloom.jit`: compile a function at its calls and keep its entries readable as (guard, code) pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from torchloom._torch import fallback, introspect
from torchloom.backends import lookup_backend
from torchloom.errors import InspectError
from torchloom.inspect.api.jit_entry import CompiledCode, CompiledEntry, EntryGuard
from torchloom.inspect.live.rewritten import graph_name
from torchloom.inspect.live.target import TargetFunction, twin_of
from torchloom.inspect.wording.breaks import first_reason
from torchloom.log import get_logger

logger = get_logger(__name__)
GraphRewrite = Callable[[fx.GraphModule], Any]


class JitFunction:
    """A function that is compiled when it is called.

    When compiling fails, the original function runs and `failures` keeps the reason.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: str | Callable[..., Any],
        passes: Sequence[GraphRewrite],
        strict: bool,
        options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, fn)
        inner = fn
        if not isinstance(inner, FunctionType):
            raise InspectError(
                f"torchloom.jit takes a Python function, not a {type(fn).__name__}: for a module, "
                "decorate its forward or use torch.compile"
            )
        self._fn = fn
        # Entries, and marks of what cannot be compiled, hang at a code object: take one of our own.
        twin = twin_of(inner)
        self._target = TargetFunction(inner.__qualname__, twin, ())
        self._graphs: dict[str, list[fx.GraphModule]] = {}
        self._passes, self._lower = tuple(passes), backend
        self.failures: list[str] = []
        """Why calls ran the original function: the first line of each error."""
        lookup_backend(backend)
        self.__torchloom_compiled__ = torch.compile(twin, backend=self._backend, **options)
        self._falls_back: fallback.FallsBack | None = None
        if not strict:
            self._falls_back = fallback.let_fall_back(
                self.__torchloom_compiled__,
                twin.__code__,
                is_whole_graph=bool(options.get("fullgraph")),
                note=self._note,
            )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function: use an entry that fits, or compile one, or run the original."""
        if torch.compiler.is_compiling():
            return self._fn(*args, **kwargs)
        # Dynamo falls back frame by frame: what ran before a failing part does not run again.
        try:
            return self.__torchloom_compiled__(*args, **kwargs)
        except Exception as error:  # anything: raised again, unless compiling failed
            # Only whole graphs raise when they cannot be compiled, and before anything has run.
            if self._falls_back is None or not self._falls_back.is_own(error):
                raise
        return self._fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a method does."""
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> str:
        """Copy and pickle as functions do: a copy is the function itself."""
        return self._target.name

    @property
    def compiled_entries(self) -> list[CompiledEntry]:
        """The entries that calls can hit now, the oldest first."""
        raws = introspect.cache_entries(self._target.code)
        raws.sort(key=lambda raw: [int(part) for part in str(raw.compile_id).split("/")])
        return [
            CompiledEntry(
                EntryGuard(raw, self._target),
                CompiledCode(raw, self._graphs_of(raw), self._target.fn),
            )
            for raw in raws
        ]

    def _graphs_of(self, raw: introspect.CacheEntry) -> list[fx.GraphModule]:
        # Where a function breaks at once its code calls none; an older entry may have had the id.
        return [] if graph_name(raw.code) is None else self._graphs.get(str(raw.compile_id), [])

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        for each in self._passes:
            each(gm)
            gm.graph.lint()
        gm.recompile()
        shown = fx.GraphModule(gm, _copied(gm.graph))
        compiled = lookup_backend(self._lower)(gm, example_inputs, **options)
        compile_id = (introspect.current_compile_id() or "").strip("[]")
        self._graphs[compile_id] = [shown]  # ids begin anew at torch._dynamo.reset()
        return compiled

    def _note(self, reason: str) -> None:
        first = first_reason(reason)
        if first not in self.failures:
            self.failures.append(first)
            logger.warning("%s runs uncompiled: %s", self._target.name, first)


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    passes: Sequence[GraphRewrite] = (),
    strict: bool = False,
    **options: Any,
) -> Any:
    """Compile a function when it is called, and keep its entries readable.

    A call uses the entry whose guard holds. If none holds, a new entry is compiled.

    Args:
        fn: a Python function; without it, returns a decorator.
        backend: a registered name or a callable.
        passes: functions that edit a captured graph in place before the backend gets it.
        strict: raise when compiling fails; otherwise the original runs and `failures` says why.
        options: more arguments for torch.compile, such as `dynamic=True` or `fullgraph=True`.

    Raises:
        InspectError: `fn` is no Python function.
        BackendError: the backend is unknown.

    Example:
        >>> @jit(backend="eager")
        ... def double(x):
        ...     return x + x
        >>> double(torch.ones(2)), len(double.compiled_entries)
        (tensor([2., 2.]), 1)
    """

    def decorate(fn: Callable[..., Any]) -> JitFunction:
        return JitFunction(fn, backend=backend, passes=passes, strict=strict, options=options)

    return decorate if fn is None else decorate(fn)


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
