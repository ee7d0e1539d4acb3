"""Symbolic sizes: what a function on fake tensors relies on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchloom._torch.shapes import (
    Condition,
    conditions_of,
    fixed_symbols,
    new_shape_env,
    no_special_sizes,
    python_text,
    symbol_values,
    symbolic_tensor,
)
from torchloom._torch.tensors import fake_mode


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
    env = new_shape_env()
    mode = fake_mode(env)
    number = 0

    def faked(value: Any) -> Any:
        nonlocal number
        if isinstance(value, torch.Tensor):
            name, dims = f"tensor{number}", varying[number]
            number += 1
            return symbolic_tensor(mode, value.detach(), dims, name)
        if isinstance(value, (list, tuple)):
            return [faked(each) for each in value]
        return value

    with no_special_sizes():
        fake_args = [faked(value) for value in args]
        fake_kwargs = {name: faked(value) for name, value in kwargs.items()}
        with mode, torch.no_grad():
            call(*fake_args, **fake_kwargs)
    return guards_of(env)


def guards_of(env: Any) -> list[SizeGuard]:
    """Return what a ShapeEnv has recorded about its symbols."""
    hints = symbol_values(env)
    # Those on unbacked symbols are asserted at each run by the compiled code itself.
    found = [
        _guard(each, hints)
        for each in conditions_of(env)
        if each.expression.free_symbols <= hints.keys()
    ]
    for symbol, expression in fixed_symbols(env).items():
        if symbol in hints:
            number = float(expression) if isinstance(hints[symbol], float) else int(expression)
            found.append(_equals(hints[symbol], number))
    return [guard for guard in found if guard.hints]


def _equals(hint: float, number: float) -> SizeGuard:
    return SizeGuard(
        f"size == {number}",
        "",
        frozenset({hint}),
        lambda sizes: sizes[hint] == number,
        f"{{{hint!r}}} == {number!r}",
    )


def _guard(condition: Condition, hints: Mapping[Any, float]) -> SizeGuard:
    expression = condition.expression
    symbols = sorted(expression.free_symbols & hints.keys(), key=str)
    hint_of = {str(symbol): hints[symbol] for symbol in symbols}
    names = ", ".join(map(str, symbols))
    printed = python_text(expression)
    test = eval(f"lambda {names}: {printed}", {"math": math, "torch": torch})  # sizes beside floats
    code = _NAME.sub(lambda n: f"{{{hint_of[n[0]]!r}}}" if n[0] in hint_of else n[0], printed)

    def holds(sizes: Mapping[float, float]) -> bool:
        return bool(test(*(sizes[hints[symbol]] for symbol in symbols)))

    where = where_of(condition.place)
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
