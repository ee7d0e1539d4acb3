"""Symbolic sizes: environments of symbols, what a trace assumed of them, and fake tensors that have them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx


class Condition(NamedTuple):
    """A condition on symbols that a trace relied on."""

    expression: Any
    """Of sympy."""
    place: Any
    """The line of code that asked: text, a frame summary, or None."""


def no_special_sizes(*, enabled: bool = True) -> AbstractContextManager[Any]:
    """Return a block in which sizes of 0 and 1 are traced like others, if `enabled`."""
    from torch.fx.experimental import _config

    config: Any = _config  # its patch() is made at run time
    return config.patch(backed_size_oblivious=enabled)


@contextmanager
def symbol_ranges(ranges: Mapping[int, tuple[int, int]]) -> Iterator[None]:
    """Give each symbol that is made in a block the range of its size, so that nothing is asked that it answers.

    Args:
        ranges: the least and the greatest value of a symbol, by what it is during the trace.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    create: Any = ShapeEnv.create_symbol

    def create_symbol(env: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(env, value, *args, **kwargs)
        if type(value) is int and value in ranges and made in symbol_values(env):
            env.constrain_symbol_range(made, *ranges[value])
        return made

    ShapeEnv.create_symbol = create_symbol
    try:
        yield
    finally:
        ShapeEnv.create_symbol = create


@contextmanager
def unknown_values() -> Iterator[None]:
    """Let `item()` of any tensor be a number of which nothing is known in a block; floats that are arguments excepted.

    Dynamo makes a symbol of the number that a CPU tensor without dims holds during the trace, and guards what it asks.
    """
    from torch._dynamo.source import FloatTensorSource
    from torch._subclasses.fake_tensor import FakeTensorConverter

    convert: Any = FakeTensorConverter.from_real_tensor

    def from_real_tensor(converter: Any, *args: Any, source: Any = None, **kwargs: Any) -> Any:
        converter.export = not isinstance(source, FloatTensorSource)  # it makes no such symbols
        return convert(converter, *args, source=source, **kwargs)

    FakeTensorConverter.from_real_tensor = from_real_tensor
    try:
        yield
    finally:
        FakeTensorConverter.from_real_tensor = convert


def range_text(value: Any) -> str:
    """Return the ranges of the symbols in a size, or in a tensor's: compilers rely on them without a guard."""
    if isinstance(value, torch.Tensor):
        return " ".join(map(range_text, value.shape))
    if not isinstance(value, torch.SymInt):
        return ""
    ranges = value.node.shape_env.var_to_range
    symbols = sorted(value.node.expr.free_symbols, key=str)
    return " ".join(f"{ranges[each].lower}..{ranges[each].upper}" for each in symbols)


def new_shape_env() -> Any:
    """Return an empty environment of symbols."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv()


def symbolic_tensor(
    mode: Any, tensor: torch.Tensor, varying: Sequence[bool], name: str
) -> torch.Tensor:
    """Return a fake tensor some of whose sizes are symbols; equal sizes are one symbol.

    Args:
        mode: from `fake_mode`.
        tensor: whose sizes, dtype and device it has.
        varying: for each dim, whether its size is a symbol.
        name: tells it from others of the mode.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DUCK if each else DimDynamic.STATIC for each in varying]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


def symbol_values(env: Any) -> dict[Any, float]:
    """Return what each symbol stood for during the trace."""
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {
        symbol: int(value) if value == int(value) else float(value)
        for symbol, value in values.items()
    }


def conditions_of(env: Any) -> Iterator[Condition]:
    """Yield what was assumed of the symbols of an environment."""
    for guard in env.guards:
        where = getattr(guard.sloc, "maybe_user_loc", None)
        yield Condition(guard.expr, where or getattr(guard.sloc, "framework_loc", None))


def fixed_symbols(env: Any) -> dict[Any, Any]:
    """Return the symbols that a trace found to be one number, with that number as an expression."""
    found = env.replacements.items()
    return {symbol: expression for symbol, expression in found if not expression.free_symbols}


def python_text(expression: Any) -> str:
    """Return an expression on symbols as Python."""
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expression)


def size_text(size: Any, symbols: Mapping[str, str]) -> str | None:
    """Return a size as Python, None if a symbol is missing.

    Args:
        size: a whole number, or a symbolic one.
        symbols: the Python that stands for a symbol, by its name.
    """
    if not isinstance(size, torch.SymInt):
        return str(size)
    names = {str(each) for each in size.node.expr.free_symbols}
    if not names <= symbols.keys():
        return None
    text = python_text(size.node.expr)
    return re.sub(r"\w+", lambda found: symbols.get(found[0], found[0]), text)


def mark_varying(
    tensor: torch.Tensor, dim: int, *, unbacked: tuple[int, int] | None = None
) -> None:
    """Let a size of an example be a symbol when it is captured.

    Args:
        tensor: the example.
        dim: which of its sizes.
        unbacked: the least and the greatest value of a symbol that nothing may branch on; None for one
            that stands for the example's own size.
    """
    from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic

    if unbacked is None:
        maybe_mark_dynamic(tensor, dim)
        return
    bounds: Any = {"min": unbacked[0], "max": unbacked[1]} if takes_bounds() else {}
    mark_unbacked(tensor, dim, hint_override=tensor.size(dim), **bounds)


@functools.cache
def takes_bounds() -> bool:
    """Return whether a symbol that nothing may branch on can have bounds: without them less can be proven."""
    from torch._dynamo.decorators import mark_unbacked

    parameters: Mapping[str, Any] = inspect.signature(mark_unbacked).parameters
    return "min" in parameters


def forget_constant_floats() -> None:
    """Forget which floats an earlier compilation wanted as constants: torch notes them by number, for all."""
    from torch._dynamo.symbolic_convert import TensorifyState

    TensorifyState.clear()


def append_size(graph: fx.Graph, size: Any, symbols: Mapping[str, fx.Node]) -> fx.Node | None:
    """Append what computes a symbolic size; return the node that has it, None if a symbol is missing.

    Args:
        graph: nodes are added at its insertion point, each with its value.
        size: a symbolic integer.
        symbols: nodes whose values are single symbols, by the names of these.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expression = size.node.expr
    if not all(str(each) in symbols for each in expression.free_symbols):
        return None
    tracer = fx.proxy.GraphAppendingTracer(graph)
    known = {
        each: fx.Proxy(symbols[str(each)], tracer)
        for each in sorted(expression.free_symbols, key=str)
    }
    before = set(graph.nodes)
    found = sympy_interp(PythonReferenceAnalysis, known, expression)
    for node in graph.nodes:
        if node not in before:
            values = fx.node.map_arg(node.args, lambda used: used.meta["val"])
            target: Any = node.target
            node.meta["val"] = target(*values)
    return found.node
