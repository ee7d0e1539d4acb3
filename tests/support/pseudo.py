"""Functions that are run from their pseudo-source, to be compared with the originals."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any

import pytest

from torchloom.inspect.pseudo import pseudo_source

MARK = "# exception handlers are not shown"


class Cases:
    """Collects functions with the arguments to call them with."""

    def __init__(self) -> None:
        self.found: list[tuple[Callable, tuple]] = []

    def __call__(self, *calls: tuple) -> Callable:
        def keep(fn: Callable) -> Callable:
            self.found.append((fn, calls or ((),)))
            return fn

        return keep

    def each(self) -> Any:
        """Return the decorator of a test of `fn` and `calls`."""
        names = [fn.__name__ for fn, _ in self.found]
        assert len(set(names)) == len(names)
        return pytest.mark.parametrize(("fn", "calls"), self.found, ids=names)


def from_text(fn: Callable, text: str | None = None) -> Callable:
    """Return the function that the pseudo-source of `fn` says, with its defaults, globals and cells."""
    text = pseudo_source(fn.__code__, "f") if text is None else text
    free = fn.__code__.co_freevars
    names = "".join(f"    {name} = None\n" for name in free)
    found: dict[str, Any] = {}
    whole = f"def outer():\n{names}{indent(text, '    ')}\n    return f\n"
    exec(compile(whole, "x", "exec", dont_inherit=True), found)
    code = found["outer"]().__code__
    assert set(code.co_freevars) <= set(free), text
    cells = dict(zip(free, fn.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    again = types.FunctionType(code, fn.__globals__, "f", fn.__defaults__, closure)
    again.__kwdefaults__ = fn.__kwdefaults__
    return again


def assert_same(fn: Callable, calls: tuple[tuple, ...]) -> None:
    """Check that a function and its pseudo-source do the same: results, effects, what is one object."""
    text = pseudo_source(fn.__code__, "f")
    lines = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert all(line.strip() == MARK for line in lines), text
    again = from_text(fn, text)
    for args in calls:
        expected, found = outcome(fn, args), outcome(again, args)
        assert found == expected, f"{args}\n{text}"


SAID: list[Any] = []


def say(value: Any) -> Any:
    """Note that a value was asked for."""
    SAID.append(repr(value))
    return value


def outcome(fn: Callable, args: tuple) -> Any:
    """Return what a call returned or raised, what became of its arguments, and what it said."""
    SAID.clear()
    args = copy.deepcopy(args)
    try:
        result = fn(*args)
        if isinstance(result, Iterator):
            result = list(result)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error), list(SAID), picture((), args, [])
    said = list(SAID)
    return picture(result, args, []), said


def picture(value: Any, args: Any, seen: list[Any]) -> Any:
    """Return a value as text; what can be changed gets a number, and is the same object where that is."""
    return _picture(value, seen), _picture(args, seen)


def _picture(value: Any, seen: list[Any]) -> Any:
    if not isinstance(value, (list, dict, set, tuple, Noted, types.SimpleNamespace)):
        return type(value).__name__, _words(value)
    if not isinstance(value, tuple):
        for number, each in enumerate(seen):
            if each is value:
                return number
        seen.append(value)
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(_picture(key, seen), _picture(each, seen)) for key, each in value.items()]
    if isinstance(value, types.SimpleNamespace):
        return kind, _picture(vars(value), seen)
    if isinstance(value, Noted):
        return kind, value.name
    parts = sorted(value, key=repr) if isinstance(value, set) else value
    return kind, [_picture(each, seen) for each in parts]


def _words(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


class Noted:
    """Says each operator that it is used with: the order of evaluation can be compared."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        say(f"bool {self.name}")
        return len(self.name) % 2 == 1

    def __iter__(self) -> Iterator[Any]:
        say(f"iter {self.name}")
        return iter([Noted(f"{self.name}0"), Noted(f"{self.name}1")])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        say((self.name, args, kwargs))
        return Noted(f"{self.name}()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        say(f"{self.name}.{name}")
        return Noted(f"{self.name}.{name}")

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _noted(name: str) -> Callable:
    def method(self: Noted, *args: Any) -> Any:
        say((name, self, *args))
        return Noted(f"{name}{len(repr(args))}")

    return method


_BOTH_SIDES = "add sub mul truediv floordiv mod matmul pow and or xor lshift rshift"
_OTHERS = "lt le gt ge ne eq getitem setitem delitem neg pos invert iadd imul"
for _each in _BOTH_SIDES.split():
    for _kind in ("", "r"):
        setattr(Noted, f"__{_kind}{_each}__", _noted(f"{_kind}{_each}"))
for _each in _OTHERS.split():
    setattr(Noted, f"__{_each}__", _noted(_each))
