"""Phases of compiles, from the begin and end events that torch logs for its own trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchloom.inspect.heard import Row
from torchloom.records import Span


class SpanReader:
    """Pairs begin and end events; those of one thread nest."""

    def __init__(self) -> None:
        self._open: dict[Any, list[tuple[str, float, str | None]]] = {}
        self._done: dict[tuple[int, str], list[Span]] = {}

    def read(self, row: Row) -> None:
        """Take one `chromium_event`."""
        event = _event(row)
        phase, name, at = event.get("ph"), event.get("name"), event.get("ts")
        if not isinstance(name, str) or not isinstance(at, (int, float)):
            return
        stack = self._open.setdefault(event.get("tid", 0), [])
        args = event.get("args")
        compile_id = args.get("compile_id") if isinstance(args, Mapping) else None
        if phase == "B":
            stack.append((name, float(at), compile_id))
        elif phase == "E":
            # Not all ends come in order: compiles of C++ end while other phases are open.
            index = next((i for i in reversed(range(len(stack))) if stack[i][0] == name), None)
            if index is not None:
                _, start, owner = stack.pop(index)
                self._close(name, start, float(at), index, (row.epoch, compile_id or owner))

    def _close(
        self, name: str, start: float, end: float, depth: int, owner: tuple[int, str | None]
    ) -> None:
        epoch, compile_id = owner
        if compile_id is None:
            return
        span = Span(name=name, start_us=start, duration_us=end - start, depth=depth)
        self._done.setdefault((epoch, str(compile_id).strip("[]")), []).append(span)

    def of(self, compile_id: str, epoch: int) -> list[Span]:
        """Return the phases of an entry in order of their start."""
        found = self._done.get((epoch, compile_id), [])
        return sorted(found, key=lambda span: (span.start_us, span.depth))


def _event(row: Row) -> Mapping[str, Any]:
    if isinstance(row.body, Mapping) and "ph" in row.body:
        return row.body
    try:
        found = json.loads(row.payload or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}
