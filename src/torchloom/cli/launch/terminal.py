"""Output to a terminal or pipe that may be closed while the run continues."""

from __future__ import annotations

import os
from typing import Any, TextIO

from torchloom.cli.terminal import GONE


class LastingOutput:
    """A stream that discards output once its reader is gone, instead of raising.

    A closed terminal, or `| head` that has exited, must not end a run.

    Args:
        stream: where text goes while there is a reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or discard."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return len(text)

    def flush(self) -> None:
        """Flush, or discard."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in GONE:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, wherever its output goes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def say(line: str) -> None:
    """Print a line, if there is still a reader."""
    try:
        print(line, flush=True)
    except OSError as error:
        if error.errno not in GONE:
            raise
