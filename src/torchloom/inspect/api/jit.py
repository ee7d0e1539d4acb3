"""`torchloom.jit`: compile a function at its calls and keep its entries readable as (guard, code) pairs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from torchloom._torch import dispatch, introspect
from torchloom.backends import lookup_backend
from torchloom.errors import InspectError
from torchloom.inspect.api.entries import LiveGuard, failure_of, sort_key
from torchloom.inspect.live.rewritten import continuations_of, graph_name
from torchloom.inspect.live.target import TargetFunction, frame_locals, twin_of
from torchloom.inspect.pseudo import pseudo_source
from torchloom.inspect.wording.breaks import first_reason
from torchloom.inspect.wording.reasons import miss_of
from torchloom.log import get_logger
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


class EntryGuard(LiveGuard):
    """The condition for using an entry. Call it with the function's arguments: it returns a bool."""

    def __init__(self, raw: Any, target: TargetFunction) -> None:
        super().__init__(raw.guard_manager, target.code)
        self._raw, self._target = raw, target

    def __call__(self, /, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call with these arguments fits this entry."""
        return self.failure(*args, **kwargs) is None

    def failure(self, /, *args: Any, **kwargs: Any) -> str | None:
        """Return the check that a call with these arguments fails, in words; None if the guard holds."""
        values = frame_locals(self._target, args, kwargs)
        failure = failure_of(self._raw, None, values)
        return None if failure is None else miss_of(str(self._raw.compile_id), failure).english

    def brief(self) -> str:
        """Return the guards about arguments, on one line."""
        about = [guard.english for guard in self.records() if guard.source.startswith("L[")]
        return " and ".join(about) or "always"


class CompiledCode:
    """What an entry runs: the rewritten bytecode and the graphs that it calls."""

    def __init__(self, raw: Any, graphs: Sequence[fx.GraphModule], fn: FunctionType) -> None:
        self.bytecode = raw.code
        """The code object that runs."""
        self.graphs, self._fn = tuple(graphs), fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the code without checking its guard. Code behind a graph break is still chosen by guards."""
        return dispatch.run_only(twin_of(self._fn, self.bytecode))(*args, **kwargs)

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
        self._falls_back: dispatch.FallsBack | None = None
        if not strict:
            self._falls_back = dispatch.let_fall_back(
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
        raws.sort(key=lambda raw: sort_key(str(raw.compile_id)))
        return [
            CompiledEntry(
                EntryGuard(raw, self._target),
                # Where a function breaks at once its code calls none; an older entry may have had the id.
                CompiledCode(
                    raw,
                    self._graphs.get(str(raw.compile_id), []) if graph_name(raw.code) else [],
                    self._target.fn,
                ),
            )
            for raw in raws
        ]

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        for each in self._passes:
            each(gm)
            gm.graph.lint()
        gm.recompile()
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        shown = fx.GraphModule(gm, graph)
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


_MAX_CHARS = 500


def expression(graph: fx.Graph) -> str:
    """Return the outputs of a graph as an expression of its inputs: the lines that fx writes, put into each other.

    Inputs have the name that the user gave them. What is longer than a few lines is "..." where it is used.
    """
    function = ast.parse(graph.python_code("self").src).body[-1]
    assert isinstance(function, ast.FunctionDef)
    values: dict[str, ast.expr] = {}
    for argument in function.args.args[1:]:
        values[argument.arg] = ast.Name(_name_of_input(argument.arg))
    filled = _Filled(values)
    for line in function.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.value) != "None":  # frees a name
            value = filled.visit(line.value)
            is_long = len(ast.unparse(value)) > _MAX_CHARS
            values[ast.unparse(line.targets[0])] = ast.Constant(...) if is_long else value
        elif isinstance(line, ast.Return) and line.value:
            result = filled.visit(line.value)
            is_alone = isinstance(result, ast.Tuple) and len(result.elts) == 1
            return ast.unparse(result.elts[0] if is_alone else result)
    return ""


class _Filled(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def _name_of_input(name: str) -> str:
    """Return the user's name of an input: Dynamo writes `L_x_` for the argument x."""
    is_dynamos = name.lower().startswith("l_") and name.endswith("_")
    return (name[2:-1].strip("_") if is_dynamos else "") or name
