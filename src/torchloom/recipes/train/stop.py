"""Signals set a flag; the loop checks it at the end of each step.

    SIGINT SIGTERM   save and stop; a second one ends the process at once
    SIGHUP           save and continue; ignored if it was ignored before (nohup)

After the `with` block, signals do what they did before.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import final


def exit_code(number: int) -> int:
    """Return the exit code of a run that a signal stopped before it could save."""
    return 128 + number


@final
class StopRequest:
    """Listen for SIGINT, SIGTERM and SIGHUP inside a `with` block."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._wants_save = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def is_set(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.signal_name is not None

    def take_save(self) -> bool:
        """Return whether this process was asked to save since the last call."""
        wants, self._wants_save = self._wants_save, False
        return wants

    def __enter__(self) -> StopRequest:
        for sig in (signal.SIGINT, signal.SIGTERM):
            self._before[sig] = signal.signal(sig, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(self, *exc: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)  # pyrefly: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            os._exit(exit_code(number))
        self.signal_name = signal.Signals(number).name

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._wants_save = True
