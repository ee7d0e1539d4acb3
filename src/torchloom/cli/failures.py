"""Errors of a user's code or disk as one message: what, where in the user's files, what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchloom.errors import RecordError

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
