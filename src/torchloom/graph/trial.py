"""Values of calls that are made again and again, on copies of one graph.

A planner lowers many copies of a graph, and most of each copy is as it was in the one before. What a
call returns is then known already: copies share the values that are recorded at their nodes, so the
inputs are the very same objects. Running an operator on fake tensors takes about a millisecond.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor


class KnownValues:
    """What calls returned in earlier trials, by operator and arguments.

    Example:
        >>> known = KnownValues()
        >>> with known.trial():
        ...     first = value_of_call(len, ["a"], object), value_of_call(len, ["a"], object)
        >>> with known.trial():
        ...     again = value_of_call(len, ["a"], object), value_of_call(len, ["a"], object)
        >>> first == again, first[0] is first[1]
        (True, False)
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, list[Any]] = {}
        self._inputs: list[Any] = []
        self._uses: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Look up values of calls, each once: two equal calls of one trial give two tensors."""
        self._uses.clear()
        token = _KNOWN.set(self)
        try:
            yield
        finally:
            _KNOWN.reset(token)

    def get(self, target: Any, args: Any, run: Callable[[], Any]) -> Any:
        """Return what `target` gives for `args`, which `run` finds out the first time.

        Args:
            target: the operator or function called.
            args: its arguments.
            run: computes the value, the first time.
        """
        try:
            key = (target, _key(args))
            turn = self._uses[key]
        except TypeError:  # a symbolic number has no hash
            return run()
        self._uses[key] += 1
        values = self._found.setdefault(key, [])
        if not values:
            self._inputs.append(args)  # objects that are known by identity must live on
        if turn == len(values):
            values.append(run())
        return values[turn]


_KNOWN: contextvars.ContextVar[KnownValues | None] = contextvars.ContextVar("known", default=None)


def value_of_call(target: Any, args: Any, run: Callable[[], Any]) -> Any:
    """Return what a call gives: looked up in a trial, else by `run`.

    Args:
        target: the operator or function called.
        args: its arguments.
        run: computes the value, where none is known.
    """
    known = _KNOWN.get()
    return run() if known is None else known.get(target, args, run)


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return (type(value), value)  # 1, 1.0 and True are equal
