"""Opens and removes all hooks of one watch, and returns what they collected."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

from torchloom import events
from torchloom._torch import compiling, introspect
from torchloom.inspect.collected import Collected, Rewriting
from torchloom.inspect.listen.calls import EagerCounter, HitCounter
from torchloom.inspect.listen.trace import TraceTap, wrapped_callable
from torchloom.inspect.live.rewritten import continuations
from torchloom.log import get_logger

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
        self._tap = TraceTap(epoch=self._epoch, told=self._eager.told)
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
