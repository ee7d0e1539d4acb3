"""Kinds of values: functions that take what the user wrote and return the value, or raise `RefusedError`.

The error says what is wrong and what to write instead. The schema and the tables of optimizer and
scheduler parameters share these functions.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TypeAlias, TypeVar

Kind: TypeAlias = "Callable[[object], object]"
WordT = TypeVar("WordT", bound=str)

DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}


class RefusedError(ValueError):
    """A value is not of its kind: what it is, and what to write."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


def show(value: object) -> str:
    """Return a value as JSON shows it, cut to 60 characters.

    Example:
        >>> show(True), show("auto")
        ('true', '"auto"')
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def anything(value: object) -> object:
    """Take any value; text that is a number or a switch is read as one."""
    read = number_in(value)
    return value if read is None else read


def norm(value: object) -> float:
    """Take the largest norm of gradients; false, as DeepSpeed reads it, is 0: no clipping."""
    return 0.0 if value is False else number()(value)


def flag(value: object) -> bool:
    """Take true or false; 1 and 0 mean the same, as in DeepSpeed.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise RefusedError(f"{show(value)} is not a switch", "write true or false, without quotes")


def number(least: float = 0.0, most: float = math.inf) -> Callable[[object], float]:
    """Return the kind of finite numbers from `least` to `most`; it raises `RefusedError` for others.

    Example:
        >>> number()(1)
        1.0
    """

    def take(value: object) -> float:
        taken = _real(value)
        if not math.isfinite(taken):
            raise RefusedError(f"{show(value)} is not a finite number", "write a finite number")
        if not least <= taken <= most:
            raise RefusedError(f"{show(value)} is out of range", f"write {_range(least, most)}")
        return taken

    return take


def above(least: float) -> Callable[[object], float]:
    """Return the kind of numbers above `least`, with Infinity; it raises `RefusedError` for others."""

    def take(value: object) -> float:
        taken = _real(value)
        if not taken > least:
            raise RefusedError(f"{show(value)} is out of range", f"write a number above {least:g}")
        return taken

    return take


def whole(least: int = 0, most: int | None = None) -> Callable[[object], int]:
    """Return the kind of whole numbers from `least` to `most`; `1e9` counts as one.

    It raises `RefusedError` for other values.

    Example:
        >>> whole()(1e9)
        1000000000
    """

    def take(value: object) -> int:
        taken = _real(value)
        if not math.isfinite(taken) or taken != math.floor(taken):
            raise RefusedError(
                f"{show(value)} is not a whole number", "write it without a fraction"
            )
        exact = int(value) if isinstance(value, Integral) else int(taken)
        if exact < least or (most is not None and exact > most):
            top = math.inf if most is None else most
            raise RefusedError(f"{show(value)} is out of range", f"write {_range(least, top)}")
        return exact

    return take


def text(value: object) -> str:
    """Take a string that is not empty.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, str) and value.strip():
        return value
    raise RefusedError(f"{show(value)} is not a name", "write a string")


def any_text(value: object) -> str:
    """Take a string, also an empty one.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, str):
        return value
    raise RefusedError(f"{show(value)} is not text", "write a string")


def word(*words: WordT) -> Callable[[object], WordT]:
    """Return the kind of one of these words, in any case; it raises `RefusedError` for others.

    Example:
        >>> word("none", "cpu")("CPU")
        'cpu'
    """

    def take(value: object) -> WordT:
        if isinstance(value, str):
            for candidate in words:
                if candidate.lower() == value.lower():
                    return candidate
        raise RefusedError(f"{show(value)} is not known here", f"use {_either(words)}")

    return take


def dtype(value: object) -> str:
    """Take the name of a floating type, as fp32, bf16 or fp16, also with `torch.` before it.

    Raises:
        RefusedError: another name.
    """
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name in DTYPES:
        return DTYPES[name]
    close = difflib.get_close_matches(str(value).lower(), DTYPES, n=2)
    # "bfp16" is as close to "fp16" as to "bf16"; the first letter tells which is meant
    close.sort(key=lambda word: word[0] != str(value)[:1].lower())
    fix = 'use "fp32", "bf16" or "fp16"'
    if close:
        fix = f'did you mean "{close[0]}"? {fix}'
    raise RefusedError(f"{show(value)} is not a floating type here", fix)


def names(value: object) -> tuple[str, ...]:
    """Take a list of names, or one name.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, str) and value:
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value):
        return tuple(str(item) for item in value)
    raise RefusedError(f"{show(value)} is not a list of names", 'write ["name", ...]')


def flag_or_text(value: object) -> bool | str:
    """Take a switch, or a string that also switches on.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise RefusedError(f"{show(value)} is neither a switch nor a folder", "write true or a folder")


def mapping(value: object) -> Mapping[str, object]:
    """Take an object.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, Mapping):
        return value
    raise RefusedError(f"{show(value)} is not an object", "write { ... }")


def sequence(value: object) -> tuple[object, ...]:
    """Take a list.

    Raises:
        RefusedError: anything else.
    """
    if isinstance(value, list | tuple):
        return tuple(value)
    raise RefusedError(f"{show(value)} is not a list", "write [ ... ]")


def numbers(kind: Kind, length: int | None = None) -> Kind:
    """Return the kind of lists whose entries are of `kind`; it raises `RefusedError` for others.

    Example:
        >>> numbers(whole())([1, 2e3])
        (1, 2000)
    """

    def take(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise RefusedError(f"{show(value)} is not a list of numbers", "write [ ... ]")
        if length is not None and len(value) != length:
            raise RefusedError(f"{show(value)} has {len(value)} entries", f"write {length} numbers")
        return tuple(kind(item) for item in value)

    return take


def number_or_numbers(kind: Kind) -> Kind:
    """Return the kind of one value of `kind`, or a list of them; it raises `RefusedError` for others."""

    def take(value: object) -> object:
        return numbers(kind)(value) if isinstance(value, list | tuple) else kind(value)

    return take


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def number_in(value: object) -> int | float | None:
    """Return the number or switch that a text is, None if it is none.

    Example:
        >>> number_in("10"), number_in("1e-4"), number_in("True"), number_in("ten")
        (10, 0.0001, True, None)
    """
    if not isinstance(value, str) or "_" in value:
        return None
    if (switch := _SWITCHES.get(value.strip().lower())) is not None:
        return switch
    try:
        return int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    except ValueError:
        return None


def _real(value: object) -> float:
    if isinstance(value, str):
        fix = "write the number without quotes"
        raise RefusedError(f"{show(value)} is text, not a number", fix)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RefusedError(f"{show(value)} is not a number", "write a number")
    try:
        return float(value)
    except OverflowError:
        raise RefusedError(f"{show(value)} is too large", "write a smaller number") from None


def _range(least: float, most: float) -> str:
    if most == math.inf:
        return f"a number of at least {least:g}"
    return f"a number from {least:g} to {most:g}"


def _either(words: tuple[str, ...]) -> str:
    quoted = [f'"{candidate}"' for candidate in words]
    if len(quoted) == 1:
        return quoted[0]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
