"""One call of a function as one graph, and the code around it.

Dynamo turns a function into a graph and into bytecode around it (`shell`). Here they are taken apart: what was
compiled can be exchanged, the bytecode can be stored, and what would be guards are facts that may be checked
at any time.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchloom._torch.full_capture import Captured, GuardOn, capture_call
from torchloom.errors import ServeError
from torchloom.pieces.shell import Shell, plain_function
from torchloom.pieces.symbols import SizeGuard, guards_of


@dataclass
class FullGraph:
    """A captured call."""

    graph_module: torch.fx.GraphModule
    inputs: list[Any]
    """The examples, one for each placeholder; symbolic sizes stand for themselves."""
    env: Any
    """torch's ShapeEnv."""
    shell: Shell
    codes: tuple[types.CodeType, ...]
    """The functions that were traced."""
    guards: tuple[GuardOn, ...]
    """What the trace relied on besides sizes."""
    modules: Mapping[str, str]
    """Modules that these refer to among the globals, by the names that the trace gave them."""

    def size_guards(self) -> list[SizeGuard]:
        """Return what was assumed of sizes so far; compiling the graph may add to it."""
        return guards_of(self.env)


def capture_full(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    unbacked: bool = False,
    ints: Sequence[str] = (),
    floats: Sequence[str] = (),
    ranges: Mapping[int, tuple[int, int]] | None = None,
) -> FullGraph:
    """Trace a call as one graph; nothing is executed.

    Args:
        function: a function or bound method.
        args: its arguments; sizes that `mark_varying` marked are symbols.
        kwargs: its keyword arguments.
        unbacked: whether marked sizes were marked with `unbacked=True`.
        ints: expressions such as "L['n']" for whole numbers that are symbols.
        floats: likewise for floats; the graph takes each as a tensor of one number.
        ranges: the least and the greatest value of a symbol, by what it is in this call.

    Raises:
        ServeError: the call has no graph.
        torch._dynamo.exc.Unsupported: the call cannot be one graph; the text says why and where.
    """
    plain, _ = plain_function(function)
    before = set(plain.__globals__)
    found = capture_call(
        *(function, args, kwargs),
        plain=plain,
        unbacked=unbacked,
        ints=ints,
        floats=floats,
        ranges=ranges or {},
    )
    if found is None:
        raise ServeError("the call computes nothing on tensors: there is nothing to compile")
    guards = {
        (each.source, each.kind, repr(each.name), each.other or ""): each
        for each in found.guards
        if each.source
    }
    named = _named_modules(found, guards.values(), before)
    made = _made_globals(found, before)
    for name in set(plain.__globals__) - before:
        del plain.__globals__[name]  # what Dynamo left in the user's module
    return FullGraph(
        found.graph_module,
        found.inputs,
        found.env,
        _shell(found, plain, made),
        found.traced,
        tuple(guards[key] for key in sorted(guards)),
        {**named, **found.imports},
    )


def _named_modules(
    found: Captured, guards: Iterable[GuardOn], before: Collection[str]
) -> dict[str, str]:
    """Return modules that guards refer to by names which the trace made."""
    text = " ".join(f"{guard.source} {guard.other}" for guard in guards)
    roots = set(re.findall(r"G\['(\w+)'\]", text)) - set(before)
    return {
        name: module.__name__
        for name in roots
        if isinstance(module := found.scope.get(name), types.ModuleType)
    }


def _made_globals(found: Captured, before: Collection[str]) -> dict[str, Any]:
    """Return the globals that Dynamo made for its bytecode."""
    return {
        name: found.scope[name]
        for name in found.references
        if name in found.scope
        and name not in before
        and name not in found.imports
        and not name.startswith("__compiled_fn")  # the graph, whose place is taken
    }


def _shell(found: Captured, plain: types.FunctionType, made: Mapping[str, Any]) -> Shell:
    return Shell(
        found.bytecode,
        found.backend_id,
        {alias: name for alias, name in found.imports.items() if alias in found.references},
        # The function's own are looked up where the bytecode runs, which may be another process.
        {n: value for n, value in found.used_globals.items() if n not in plain.__globals__},
        made,
    )
