"""Printing text of unknown origin, and output whose reader is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO

GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
"""Error numbers of writes to a closed terminal or pipe."""


def printable(text: str) -> str:
    """Return a text with control characters escaped, so that it cannot control the terminal.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" else f"\\x{ord(each):02x}" for each in text
    )


def drop_unread() -> None:
    """Discard output that nobody can read any more.

    Python flushes stdout and stderr when it exits. If that fails, the exit code is 120, whatever the
    command's result was. A full disk stays an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and _is_gone(stream):
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _is_gone(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError as error:
        return error.errno in GONE
    return False
