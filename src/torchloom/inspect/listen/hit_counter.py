"""Counts how often each entry is used.

The code of an entry calls its compiled graph by a global name of its own. While a watch is open, that global
holds a function that counts and then calls the graph; afterwards it holds the graph again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

from torchloom._torch.untraced import never_compile
from torchloom.inspect.live.rewritten import graph_name


class _Counted(NamedTuple):
    namespace: dict[str, Any]
    name: str
    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    count: list[int]


class HitCounter:
    """Counts the calls of entries that are compiled between its creation and `close`."""

    def __init__(self) -> None:
        self._expected: list[tuple[CodeType, dict[str, Any]]] = []
        self._counted: dict[str, _Counted] = {}
        self._guard = threading.Lock()
        self._is_open = True

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
                original = namespace.get(name)
                if original is None:
                    waiting.append((code, namespace))
                elif name not in self._counted:
                    self._counted[name] = _count(namespace, name, original)
            self._expected = waiting

    def counts(self) -> dict[str, int]:
        """Return calls by the name of the graph's global."""
        self.install()
        return {name: each.count[0] for name, each in self._counted.items()}

    def close(self) -> None:
        """Put the graphs back into their globals."""
        with self._guard:
            self._is_open = False
            for each in self._counted.values():
                # A watch around or inside this one may stand in front by now.
                if each.namespace.get(each.name) is each.wrapper:
                    each.namespace[each.name] = each.original
            self._counted, self._expected = {}, []


def _count(namespace: dict[str, Any], name: str, original: Callable[..., Any]) -> _Counted:
    count = [0]

    def counted(*args: Any) -> Any:
        count[0] += 1
        return original(*args)

    never_compile(counted.__code__)
    namespace[name] = counted
    return _Counted(namespace, name, original, counted, count)
