"""Files that are whole or not there: what is written beside a file takes its place at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a text or bytes so that no reader ever sees half of it, and return its path; folders are made.

    Several processes may write one path at a time: the last one wins.

    Raises:
        OSError: the folder or the file cannot be written; what was there stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(partial).chmod(0o644)  # temporary files are private
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path
