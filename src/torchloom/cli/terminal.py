"""Print text of unknown origin, errors of users' code, what takes long, and output whose reader is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torchloom.errors import RecordError

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO)
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


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Show on a terminal what takes long, and for how long already; elsewhere show nothing.

    Args:
        what: such as "compiling for batch 1 to 64".
    """
    # Each command imports this module, and these take a fourth of the time that the others need to start.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        progress.add_task(what, total=None)
        yield


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Let writes inside a `with` block end without an error where the reader is gone."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


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
        with unread():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or discard."""
        with unread():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, wherever its output goes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def print_table(
    rows: Iterable[Sequence[Any]], *headers: str, title: str = "", width: int | None = None
) -> None:
    """Print rows as columns, without markup in what they say.

    Args:
        rows: texts, or texts with a style; a row may be shorter than others.
        headers: names of the columns, where they have names.
        title: stands above.
        width: of the output; None: that of the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(
        *headers, title=title or None, box=None, show_header=bool(headers), pad_edge=False
    )
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, width=width).print(table)


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
        return error.errno in _GONE
    return False


_MAX_FRAMES = 6
_MAX_LINES = 12


def told(what: str, error: BaseException, advice: str) -> str:
    """Return a message: what a user's code raised, and the lines of that code in the traceback.

    Args:
        what: the script or function that was run.
        error: what it raised.
        advice: where the whole traceback is, or how to see it.
    """
    lines = str(error).strip().splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"... and {len(lines) - _MAX_LINES} more lines"]
    name = type(error).__name__
    head = f"{what} raised {name}" + (f": {lines[0]}" if lines else "")
    where = [f"  {place}" for place in _places(error)]
    return "\n".join([head, *(f"  {line}" for line in lines[1:]), *where, advice])


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside a `with` block into one message.

    Raises:
        RecordError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _places(error: BaseException) -> list[str]:
    """Return `file:line in function: code` of the user's frames, innermost last."""
    from torchloom.last_words import is_users  # imports torch

    found = [
        f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if is_users(frame.filename)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        found.append(f"at {error.filename}:{error.lineno}: {(error.text or '').strip()}")
    left_out = len(found) - _MAX_FRAMES
    return [f"... {left_out} frames", *found[-_MAX_FRAMES:]] if left_out > 0 else found
