"""Stop requests: a signal sets a flag, and the loop saves and leaves at the next step's end.

A second signal leaves at once. Outside the block signals do what they did before.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import final

EXIT_INTERRUPTED = 130
"""Exit code of a run that was stopped before it could save; one that saved exits with 0."""


@final
class StopRequest:
    """Listen for SIGINT and SIGTERM inside a `with` block."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def is_set(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        for sig in (signal.SIGINT, signal.SIGTERM):
            self._before[sig] = signal.signal(sig, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)  # pyrefly: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            os._exit(EXIT_INTERRUPTED)
        self.signal_name = signal.Signals(number).name
