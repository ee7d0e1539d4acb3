"""Counts calls: how often each entry is used, and calls that fit no entry and that Dynamo no longer compiles.

The code of an entry calls its compiled graph by a global name of its own. While a watch is open, that global
holds a function that counts and then calls the graph; afterwards it holds the graph again.

Over the recompile limit Dynamo still looks for an entry at each call, finds none, and runs the function eagerly
without logging anything. Such a call shows as a lookup without a hit that no compile follows.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torchloom._torch import compiling, introspect
from torchloom._torch.untraced import never_compile
from torchloom.inspect.collected import EagerCalls, Row
from torchloom.inspect.live.rewritten import graph_name


class _Counted:
    """Stands in front of the graph of an entry, in the global by which the entry calls it."""

    def __init__(self, namespace: dict[str, Any], name: str) -> None:
        self._namespace, self._name, self._graph = namespace, name, namespace[name]
        self.num_calls = 0
        namespace[name] = self

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self._graph(*args)

    def remove(self) -> None:
        """Put the graph back, unless a watch around or inside this one stands in front by now."""
        if self._namespace.get(self._name) is self:
            self._namespace[self._name] = self._graph


class HitCounter:
    """Counts the calls of entries that are compiled between its creation and `close`."""

    def __init__(self) -> None:
        self._expected: list[tuple[CodeType, dict[str, Any]]] = []
        self._counted: dict[str, _Counted] = {}
        self._guard = threading.Lock()
        self._is_open = True
        never_compile(_Counted.__call__.__code__)

    def expect(self, code: CodeType, namespace: dict[str, Any] | None) -> None:
        """Note the code of a new entry; Dynamo sets the global of its graph later.

        Args:
            code: as Dynamo wrote it.
            namespace: the globals in which it runs.
        """
        if namespace is not None:
            with self._guard:
                self._expected.append((code, namespace))

    def install(self) -> None:
        """Wrap the graphs whose globals Dynamo has set since the last call."""
        with self._guard:
            if not self._is_open:
                return
            waiting = []
            for code, namespace in self._expected:
                name = graph_name(code)
                if name is None:
                    continue
                if namespace.get(name) is None:
                    waiting.append((code, namespace))
                elif name not in self._counted:
                    self._counted[name] = _Counted(namespace, name)
            self._expected = waiting

    def counts(self) -> dict[str, int]:
        """Return calls by the name of the graph's global."""
        self.install()
        return {name: each.num_calls for name, each in self._counted.items()}

    def close(self) -> None:
        """Put the graphs back into their globals."""
        with self._guard:
            self._is_open = False
            for each in self._counted.values():
                each.remove()
            self._counted, self._expected = {}, []


_Lookup = tuple[int, CodeType | None]
"""The number of resets of Dynamo before the lookup, and the function that was called, None if unknown."""


class EagerCounter:
    """Counts, by epoch and code object, calls that ran eagerly because no entry fitted.

    Args:
        epoch: returns how often Dynamo has been reset.
    """

    def __init__(self, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        self.num_lookups = 0
        """How often Dynamo looked for an entry; for some functions it never looks."""
        self._counts: Counter[tuple[int, CodeType]] = Counter()
        self._limited: dict[tuple[int, CodeType], int] = {}
        self._num_unknown = 0
        self._waiting: dict[int, _Lookup] = {}
        """By thread, the last lookup without a hit, until it is known whether a compile follows."""
        self._guard = threading.Lock()

    def looked_up(self, is_hit: bool, caller: FrameType | None) -> None:
        """Note that Dynamo has looked for an entry on this thread.

        Args:
            is_hit: whether it found one.
            caller: the frame from which the function is called.
        """
        self.num_lookups += 1
        self._settle()
        if not is_hit:
            found = None if caller is None else self._called(caller)
            self._waiting[threading.get_ident()] = (self._epoch(), found)

    def told(self, row: Row) -> None:
        """Note a row of a compile on this thread."""
        if row.code is None:
            return
        waiting = self._waiting.pop(threading.get_ident(), None)
        # A compile follows the lookup. A function without entries is not looked up: the lookup was
        # that of another one, maybe in a thread that had this one's number and has ended.
        if waiting is not None and not introspect.cache_entries(row.code):
            self._count(waiting)
        if row.is_limit:
            self._limited[row.epoch, row.code] = compiling.limit_of_compile()
            self._count((row.epoch, row.code))  # the call that found the limit

    def close(self) -> EagerCalls:
        """Settle the last lookups of all threads, also of those that have ended, and return the counts."""
        for thread, frame in sys._current_frames().items():
            if thread in self._waiting and compiling.is_in_compile(frame):
                self._waiting.pop(thread, None)  # a compile follows that has told nothing as yet
        for thread in list(self._waiting):
            self._settle(thread)
        return EagerCalls(self._counts, self._limited, self._num_unknown)

    def _settle(self, thread: int | None = None) -> None:
        waiting = self._waiting.pop(threading.get_ident() if thread is None else thread, None)
        if waiting is not None:
            self._count(waiting)

    def _count(self, call: _Lookup) -> None:
        epoch, code = call
        with self._guard:
            if code is None:
                self._num_unknown += 1
            else:
                self._counts[epoch, code] += 1

    def _called(self, caller: FrameType) -> CodeType | None:
        """Return the code of the function that a frame is about to call, found by the names in that frame."""
        epoch = self._epoch()
        limited = [code for at, code in list(self._limited) if at == epoch]
        is_wrapper = caller.f_code.co_name == "compile_wrapper"
        if not limited and not is_wrapper:
            return None  # before Python 3.13 reading a frame's variables keeps them alive in it
        named = list(_named_by(caller))
        for code in limited:
            if any(each is code for each in named):
                return code
        if is_wrapper and named:
            return named[0]
        others = {each.co_name: each for each in named}
        same = [c for c in limited if c.co_name in caller.f_code.co_names]
        if len(same) == 1 and same[0].co_name in others:  # another function of that name
            return others[same[0].co_name]
        return same[0] if len(same) == 1 else None


def _named_by(frame: FrameType) -> Iterator[CodeType]:
    """Yield the code of the functions that a frame can call by name, those of a wrapper first."""
    values = frame.f_locals
    own = [name for name in ("fn", "self") if name in values]
    names = [*own, *frame.f_code.co_names, *values]
    for name in names:
        value = values.get(name, frame.f_globals.get(name))
        yield from _code_of(value)


def _code_of(value: Any) -> Iterator[CodeType]:
    # By exact type: nothing of the program's own classes is asked.
    if type(value) is MethodType:
        value = value.__func__
    if type(value) is FunctionType:
        yield value.__code__
