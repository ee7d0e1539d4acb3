"""Opens and removes all hooks of one watch, and collects the structured trace of torch.compile.

torch writes a record of every stage to the logger `torch.__trace` as soon as that logger has a handler. These are
the records that `TORCH_TRACE` writes and tlparse reads.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

from torchloom import events
from torchloom._torch import compiling, introspect
from torchloom.inspect.collected import Collected, Rewriting, Row
from torchloom.inspect.listen.calls import EagerCounter, HitCounter
from torchloom.inspect.live.rewritten import continuations
from torchloom.inspect.live.target import Named, named
from torchloom.log import get_logger

LOGGER = "torch.__trace"

_CONTEXT = (
    "rank",
    "frame_id",
    "frame_compile_id",
    "attempt",
    "compiled_autograd_id",
    "has_payload",
    "stack",
    "subgraph_name",
    "process",
)

_BULK = ("fx_graph_cache_", "describe_", "aotautograd_cache_")
"""Kinds whose payloads are nine tenths of all bytes and say little: only the first characters are kept."""
_BULK_CHARS = 2000
_MAX_PAYLOAD_CHARS = 1 << 20
_MAX_TOTAL_CHARS = 256 << 20
"""When this much has been kept, further payloads are dropped and counted."""


_BEGINS = frozenset({"dynamo_start", "recompile_reasons", "compilation_metrics"})


def wrapped_callable() -> Named | None:
    """Return what this thread compiles through a wrapper function of torch's; None for any other function."""
    try:
        found = compiling.compiling_wrapped()
        return None if found is None else named(found)
    except Exception:  # noqa: BLE001  an object of the program may raise anything
        return None


class TraceTap(logging.Handler):
    """Collects the trace of this process while attached.

    It is called on the compiling thread, copies, and returns.

    Args:
        epoch: returns how often Dynamo has been reset; called at each row.
        told: called with each row of a compile.
    """

    def __init__(self, epoch: Callable[[], int], told: Callable[[Row], None]) -> None:
        super().__init__(logging.DEBUG)
        self._epoch, self._told = epoch, told
        self.rows: list[Row] = []
        self.spent_s = 0.0
        self.num_dropped = 0
        self._left = _MAX_TOTAL_CHARS
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; raises nothing into the compiler."""
        started = time.perf_counter()
        try:
            metadata = getattr(record, "metadata", None)
            if isinstance(metadata, dict):
                self._keep(metadata, getattr(record, "payload", None))
        except Exception:  # noqa: BLE001  any bug of ours: the compiler that logs must not fail for it
            self.num_dropped += 1
        self.spent_s += time.perf_counter() - started

    def _keep(self, metadata: dict[str, Any], payload: Any) -> None:
        kinds = [key for key in metadata if key not in _CONTEXT]
        if not kinds:
            return
        kind, body = kinds[0], metadata[kinds[0]]
        if kind == "artifact" and isinstance(body, dict):
            kind = str(body.get("name", kind))
        text = self._cut(kind, payload)
        row = Row(
            kind,
            body,
            text,
            metadata.get("frame_id"),
            metadata.get("frame_compile_id"),
            metadata.get("attempt") or 0,
            self._epoch(),
            compiling.compiling_code() if kind in _BEGINS else None,
            compiling.compiling_stack() if kind == "dynamo_start" else (),
            compiling.guards_being_built_us() if kind == "dynamo_cpp_guards_str" else None,
            wrapped_callable() if kind in _BEGINS else None,
        )
        with self._guard:
            self.rows.append(row)
        if row.frame_id is not None:
            self._told(row)

    def _cut(self, kind: str, payload: Any) -> str | None:
        if payload is None:
            return None
        text = payload if isinstance(payload, str) else str(payload)
        text = text[: _BULK_CHARS if kind.startswith(_BULK) else _MAX_PAYLOAD_CHARS]
        if len(text) > self._left:
            self.num_dropped += 1
            return None
        self._left -= len(text)
        return text

    def __enter__(self) -> TraceTap:  # noqa: PYI034
        logging.getLogger(LOGGER).addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)


logger = get_logger(__name__)

_HERE = ("torchloom/inspect/", "torchloom/_torch/")


def quietly(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that logs its errors and raises none."""

    def guarded(*args: Any) -> None:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001  any bug of ours: the program that is watched goes on
            logger.debug("a hook of a watch failed: %s", type(error).__name__)

    return guarded


def caller_of_lookup() -> FrameType | None:
    """Return the frame that calls the function whose entries Dynamo has just searched."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _HERE):
        frame = frame.f_back
    return frame


_MAX_EVENTS = 100_000
"""A training step emits some tens of events: this bounds the memory of a watch that stays open for days."""


class Collector:
    """Collects what torch.compile and torchloom do from `open` to `close`. Use each object once."""

    def __init__(self) -> None:
        self._num_resets = 0
        self._hits, self._eager = HitCounter(), EagerCounter(self._epoch)
        self._tap = TraceTap(self._epoch, self._eager.told)
        self._recorder = events.Recorder(limit=_MAX_EVENTS)
        self._rewritings: list[Rewriting] = []
        self._after_compile = compiling.AfterCompile(quietly(self._hits.install))
        self._stack: ExitStack | None = None

    def open(self) -> None:
        """Install all hooks; if one fails, remove those installed before it."""
        looked_up = compiling.AfterLookup(quietly(self._looked_up))
        self._started_at_s, self._started = time.time(), time.perf_counter()
        with ExitStack() as stack:
            stack.callback(self._hits.close)
            stack.enter_context(self._recorder)
            stack.enter_context(compiling.bytecode_hook(quietly(self._on_bytecode)))
            stack.callback(self._after_compile.remove)
            self._after_compile.install()
            stack.callback(looked_up.remove)
            looked_up.install()
            stack.enter_context(self._tap)
            self._stack = stack.pop_all()

    def close(self) -> Collected:
        """Remove all hooks and return what they collected."""
        duration_s = time.perf_counter() - self._started if self._stack else 0.0
        self._epoch()  # also of a reset that no compile has followed
        stack, self._stack = self._stack, None
        eager = self._eager.close()
        num_hits: dict[str, int] = {}
        quietly(lambda: num_hits.update(self._hits.counts()))()
        if stack is not None:
            stack.close()
        dropped = {"events": self._recorder.num_dropped, "texts": self._tap.num_dropped}
        return Collected(
            rows=self._tap.rows,
            rewritings=self._rewritings,
            num_hits=num_hits,
            events=self._recorder.events,
            eager=eager,
            num_lookups=self._eager.num_lookups,
            num_resets=self._num_resets,
            started_at_s=self._started_at_s,
            duration_s=duration_s,
            listening_ms=self._tap.spent_s * 1e3,
            num_dropped={what: number for what, number in dropped.items() if number},
        )

    def _epoch(self) -> int:
        """Return how often Dynamo has been reset since `open`."""
        if self._stack is not None and self._after_compile.install():
            self._num_resets += 1
        return self._num_resets

    def _looked_up(self, is_hit: bool) -> None:
        # Two frames of ours, one of the hook: above them stands the caller.
        self._eager.looked_up(is_hit, None if is_hit else caller_of_lookup())

    def _on_bytecode(self, original: CodeType, transformed: CodeType) -> None:
        namespace = compiling.compiling_globals() or {}
        rewriting = Rewriting(
            introspect.current_compile_id() or "?",
            original,
            transformed,
            self._epoch(),
            compiling.continued_code(original),
            continuations(transformed, namespace),
            wrapped_callable(),
            compiling.traced_code(),
        )
        self._rewritings.append(rewriting)
        self._hits.install()
        self._hits.expect(transformed, namespace)
