"""The signatures that a pass may have, and how its arguments are found.

    fn(gm, ctx) -> int                                                         torchloom's own
    fn(graph, graph_id, graph_order, profiling_results, mem_budget,
       param_manager, bwd, ds_optimizer, nz3) -> graph                         DeepCompile, documented
    fn(gm, graph_id, graph_order, profiling_results, create_inputs_fn,
       mem_budget, param_manager, bwd) -> gm or None                           DeepCompile, today

Arguments are passed by name, so a function may take any of them in any order. One that takes as many arguments as a
form of DeepCompile's and has other names for some of them is called by position, as DeepSpeed calls it.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom._torch.modes import without_modes
from torchloom.errors import PassError
from torchloom.graph import GraphPass, PassContext, graph_text

OWN = ("gm", "ctx")
DOCUMENTED = (
    *("graph", "graph_id", "graph_order", "profiling_results", "mem_budget"),
    *("param_manager", "bwd", "ds_optimizer", "nz3"),
)
CURRENT = (
    *("gm", "graph_id", "graph_order", "profiling_results", "create_inputs_fn"),
    *("mem_budget", "param_manager", "bwd"),
)
NAMES = tuple(dict.fromkeys((*OWN, *DOCUMENTED, *CURRENT)))
# Values of these arguments do not follow from the graph that a pass is called with.
BEYOND = frozenset(
    {
        *("graph_order", "profiling_results", "param_manager", "create_inputs_fn"),
        *("ds_optimizer", "nz3"),
    }
)
_BY_COUNT = {len(each): each for each in (DOCUMENTED[:7], CURRENT, DOCUMENTED)}


Argument = Callable[[str, fx.GraphModule, PassContext], Any]
"""Returns the value of one argument of `NAMES`; see `deepcompile.site`."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """Wraps a function of any of the forms so that a `GraphPass` can hold it."""

    fn: Callable[..., Any]
    positional: tuple[str, ...]
    """Arguments given by position."""
    named: tuple[str, ...]
    """Arguments given by name."""

    @property
    def takes(self) -> frozenset[str]:
        """Names of all arguments that the function receives."""
        return frozenset((*self.positional, *self.named))

    @property
    def sees_beyond_its_graph(self) -> bool:
        """Whether its result may depend on more than the graph and the context."""
        return bool(self.takes & BEYOND)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function itself: `inspect.signature` reads its options there."""
        return self.fn

    def __call__(self, gm: fx.GraphModule, ctx: PassContext, **options: object) -> int:
        """Refuse: a compile session binds the function to its site first.

        Raises:
            PassError: always, unless the function has torchloom's own form.
        """
        if self.takes <= set(OWN):
            return self.at(lambda name, gm, ctx: {"gm": gm, "ctx": ctx}[name])(gm, ctx, **options)
        raise PassError("a pass of DeepCompile's form runs in a compile session only")

    def at(self, argument: Argument) -> Callable[..., int]:
        """Return the function as `(gm, ctx, **options) -> number of edits`, bound to where it runs.

        Raises:
            PassError: (by the returned function) the pass changed the graph's inputs or the number
                of its results.
        """

        def run(gm: fx.GraphModule, ctx: PassContext, **options: object) -> int:
            positional = [argument(name, gm, ctx) for name in self.positional]
            named = {name: argument(name, gm, ctx) for name in self.named}
            shape, before = _shape_of(gm.graph), graph_text(gm.graph)
            runs_it = "create_inputs_fn" in self.takes  # compilers call passes under fake tensors
            with without_modes() if runs_it else nullcontext(), _named_operators():
                result = self.fn(*positional, **{**named, **options})
            num_edits = _take_over(gm, result)
            if _shape_of(gm.graph) != shape:
                raise PassError(
                    "the pass changed the graph's inputs or the number of its results: a graph "
                    "must take and return what it did"
                )
            return num_edits or _num_changes(before, graph_text(gm.graph))

        return run


@contextmanager
def _named_operators() -> Iterator[None]:
    """Name an operator of DeepSpeed's native module that a pass looks for in our graphs.

    Raises:
        PassError: in place of torch's AttributeError.
    """
    try:
        yield
    except AttributeError as error:
        found = _OPERATOR.search(str(error))
        if found is None:
            raise
        raise PassError(
            f"torch.ops.dc.{found[1]} is an operator of DeepSpeed's, which torchloom's graphs do not have: find transfers "
            "by torchloom.ops.match, or take torchloom's own pass by its name in the schedule"
        ) from error


_OPERATOR = re.compile(r"'_OpNamespace' 'dc' object has no attribute '(\w+)'")


def adapt(name: str, fn: Callable[..., Any]) -> Adapted:
    """Find the arguments that a pass takes, and wrap it.

    Args:
        name: of the pass, for messages.
        fn: a function of one of the forms above. Parameters with defaults are options of its own.

    Raises:
        PassError: `fn` is not callable, or has a parameter that belongs to no form.

    Example:
        >>> adapt("mine", lambda bwd, graph: graph).named
        ('bwd', 'graph')
    """
    if not callable(fn):
        raise PassError(f"pass {name!r} is a {type(fn).__name__}: register a function")
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise PassError(
            f"the arguments of pass {name!r} cannot be read: wrap it in a function"
        ) from None
    form = _form_of(parameters.values())
    if form is not None:
        return Adapted(fn, form, ())
    positional, named = [], []
    for param in parameters.values():
        if param.kind is inspect.Parameter.VAR_KEYWORD:
            named += [each for each in NAMES if each not in (*positional, *parameters)]
        elif param.kind is inspect.Parameter.VAR_POSITIONAL:
            if len(parameters) == 1:
                raise PassError(
                    f"pass {name!r} tells no arguments: name them, any of {', '.join(NAMES)}"
                )
        elif param.name in NAMES:
            by_position = param.kind is inspect.Parameter.POSITIONAL_ONLY
            (positional if by_position else named).append(param.name)
        else:
            _check_option(name, param)
    return Adapted(fn, tuple(positional), tuple(named))


def adapted_of(each: GraphPass) -> Adapted | None:
    """Return the adapted function of a pass, None where the pass has torchloom's own form."""
    return each.fn if isinstance(each.fn, Adapted) else None


def _form_of(parameters: Iterable[inspect.Parameter]) -> tuple[str, ...] | None:
    """Return DeepCompile's form of a function that has other names for some of its arguments, in the form's order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is inspect.Parameter.empty]
    form = _BY_COUNT.get(len(needed), ())
    if not form or any(each.kind not in kinds for each in needed):
        return None
    names = [each.name for each in needed]
    fits = all(given == name or given not in NAMES for given, name in zip(names, form, strict=True))
    return form if fits and not set(names) <= set(NAMES) else None


def _check_option(name: str, param: inspect.Parameter) -> None:
    """Allow a parameter with a default, unless it looks like a misspelt argument."""
    near = difflib.get_close_matches(param.name, NAMES, n=1, cutoff=0.8)
    if param.default is not inspect.Parameter.empty and not near:
        return
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
    raise PassError(
        f"pass {name!r} has a parameter {param.name!r} that no form of a pass has: {hint}; an "
        "option of the pass's own needs a default"
    )


def _take_over(gm: fx.GraphModule, result: Any) -> int:
    """Make a pass's result the graph of `gm`; return the number of edits that it reports."""
    if isinstance(result, bool) or not isinstance(result, int | fx.Graph | None):
        if not isinstance(result, fx.GraphModule):
            raise PassError(
                f"the pass returned a {type(result).__name__}: return the graph, the graph "
                "module, a number of edits, or None for no change"
            )
        for node in result.graph.find_nodes(op="get_attr"):
            if not hasattr(gm, str(node.target)):
                setattr(gm, str(node.target), getattr(result, str(node.target)))
        result = result.graph
    if isinstance(result, int):
        return result
    if result is not None and result is not gm.graph:
        gm.graph = result
    return 0


def _num_changes(before: str, after: str) -> int:
    """Count the lines of a graph that were added or removed; 1 if lines only moved."""
    if before == after:
        return 0
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return max(1, sum(((old - new) + (new - old)).values()))


def _shape_of(graph: fx.Graph) -> tuple[object, ...]:
    """Return the names of a graph's inputs and the number of its results."""
    results = graph.output_node().args[0]
    num_results = len(results) if isinstance(results, list | tuple) else 1
    return (*(node.name for node in graph.find_nodes(op="placeholder")), num_results)
