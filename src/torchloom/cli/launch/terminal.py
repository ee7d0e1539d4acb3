"""Output to a terminal or pipe that may go away while the run goes on."""

from __future__ import annotations

import os
from typing import Any, TextIO

from torchloom.cli.terminal import GONE


class LastingOutput:
    """A stream that drops what nobody can read any more, instead of failing.

    A terminal that is closed, or `| head` that has seen enough, is no reason to lose a step.

    Args:
        stream: where text goes while somebody reads.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in GONE:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_terminal() -> bool:
    """Say whether this process has a controlling terminal, whatever its output goes to."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def say(line: str) -> None:
    """Print a line for whoever reads."""
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in GONE:
            raise
