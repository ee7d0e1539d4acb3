"""Symbolic sizes: what a function on fake tensors relies on (2.11-2.15)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class SizeGuard:
    """A condition on sizes that a trace relied on."""

    text: str
    where: str
    """The user's file and line, where known."""
    hints: frozenset[float]
    """What the sizes in it were during the trace; different symbols have different ones. Floats are among them
    where a call's floats are symbols; none of these is a whole number."""
    holds: Callable[[Mapping[float, float]], bool]
    """Evaluate it for other sizes, by hint."""
    code: str = ""
    """The condition as Python, in which `{64}` stands for the size whose hint is 64."""


def size_guards(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varying: Sequence[Sequence[bool]],
) -> list[SizeGuard]:
    """Call a function on fake tensors whose sizes are symbols; return what it relied on.

    Args:
        call: the function.
        args: its arguments; tensors are replaced by fake ones.
        kwargs: its keyword arguments.
        varying: for each tensor, in order, which of its sizes are symbols. Equal sizes are one
            symbol; sizes of 0 and 1 are no more special than others.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    config: Any = _config  # its patch() is made at run time
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    number = 0

    def faked(value: Any) -> Any:
        nonlocal number
        if isinstance(value, torch.Tensor):
            kinds = [DimDynamic.DUCK if each else DimDynamic.STATIC for each in varying[number]]
            context = StatelessSymbolicContext(dynamic_sizes=kinds)
            source = ConstantSource(f"tensor{number}")
            number += 1
            return mode.from_tensor(value.detach(), symbolic_context=context, source=source)
        if isinstance(value, (list, tuple)):
            return [faked(each) for each in value]
        return value

    with config.patch(backed_size_oblivious=True):
        fake_args = [faked(value) for value in args]
        fake_kwargs = {name: faked(value) for name, value in kwargs.items()}
        with mode, torch.no_grad():
            call(*fake_args, **fake_kwargs)
    return guards_of(env)


def guards_of(env: Any) -> list[SizeGuard]:
    """Return what a ShapeEnv has recorded about its symbols."""
    hints = _hints(env)
    # Those on unbacked symbols are asserted at each run by the compiled code itself.
    found = [
        _guard(guard.expr, guard.sloc, hints)
        for guard in env.guards
        if guard.expr.free_symbols <= hints.keys()
    ]
    for symbol, expression in env.replacements.items():
        if symbol in hints and not expression.free_symbols:
            number = float(expression) if isinstance(hints[symbol], float) else int(expression)
            found.append(_equals(hints[symbol], number))
    return [guard for guard in found if guard.hints]


def _hints(env: Any) -> dict[Any, float]:
    """Return what each symbol stood for during the trace."""
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {
        symbol: int(value) if value == int(value) else float(value)
        for symbol, value in values.items()
    }


def _equals(hint: float, number: float) -> SizeGuard:
    return SizeGuard(
        f"size == {number}",
        "",
        frozenset({hint}),
        lambda sizes: sizes[hint] == number,
        f"{{{hint!r}}} == {number!r}",
    )


def _guard(expression: Any, place: Any, hints: Mapping[Any, float]) -> SizeGuard:
    from torch.utils._sympy.printers import PythonPrinter

    symbols = sorted(expression.free_symbols & hints.keys(), key=str)
    hint_of = {str(symbol): hints[symbol] for symbol in symbols}
    names = ", ".join(map(str, symbols))
    printed = PythonPrinter().doprint(expression)
    test = eval(f"lambda {names}: {printed}", {"math": math, "torch": torch})  # sizes beside floats
    code = _NAME.sub(lambda n: f"{{{hint_of[n[0]]!r}}}" if n[0] in hint_of else n[0], printed)

    def holds(sizes: Mapping[float, float]) -> bool:
        return bool(test(*(sizes[hints[symbol]] for symbol in symbols)))

    where = where_of(
        getattr(place, "maybe_user_loc", None) or getattr(place, "framework_loc", None)
    )
    text = str(expression)
    for symbol in symbols:
        text = text.replace(str(symbol), f"<size {hints[symbol]}>")
    return SizeGuard(text, where, frozenset(hints[s] for s in symbols), holds, code)


_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def where_of(place: Any) -> str:
    """Return a line of code, of the user's if it is known, else of torch's, as text."""
    if place is None:
        return ""
    if isinstance(place, str):
        return _LOCATION.sub(lambda found: _whole_path(found[0]), place)
    return f"{place.filename}:{place.lineno} in {place.name}"


_LOCATION = re.compile(r"(?<=  # ).+(?=:\d+ in )")
"""The path in a line of torch's: `if rows > 3:  # folder/model.py:13 in forward`."""


def _whole_path(path: str) -> str:
    """Return a path that torch has shortened, with what it should not have cut.

    It leaves out the folders that a file shares with torch itself, and the next character; where
    they share the root alone, that is the first letter of the path.
    """
    torch_folder = Path(torch.__file__).parent
    if any(_is_file(folder / path) for folder in (torch_folder, *torch_folder.parents)):
        return path
    root, (first, *rest) = Path(torch_folder.anchor), Path(path).parts
    folders = (folder for folder in root.iterdir() if folder.name[1:] == first)
    found = [each for folder in folders if _is_file(each := folder.joinpath(*rest))]
    return str(found[0]) if len(found) == 1 else path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # nobody may look there
        return False


def with_numbers(
    values: Sequence[Any], env: Any, sizes: Mapping[int, int]
) -> tuple[Any, list[Any]]:
    """Return a fake mode and copies of fake tensors and sizes in it, whose symbols are numbers.

    Args:
        values: fake tensors and sizes.
        env: the ShapeEnv of their symbols.
        sizes: what symbols become, by what they were during the trace.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    numbers = {
        symbol: sizes.get(hint, hint)
        for symbol, hint in _hints(env).items()
        if isinstance(hint, int)
    }
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def number(size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        expression: Any = size.node.expr  # of sympy, whose types say less than it does
        return int(expression.xreplace(numbers))

    def copied(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return number(value)
        if not isinstance(value, torch.Tensor):
            return value
        shape, strides = (tuple(map(number, each)) for each in (value.shape, value.stride()))
        made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        kind = getattr(value, "_dynamo_static_input_type", None)
        if kind is not None:
            made._dynamo_static_input_type = kind  # type: ignore[attr-defined]
        return made

    with mode:
        return mode, [copied(value) for value in values]


def forget_constant_floats() -> None:
    """Forget which floats an earlier compilation wanted as constants: torch notes them by number, for all."""
    from torch._dynamo.symbolic_convert import TensorifyState

    TensorifyState.clear()
