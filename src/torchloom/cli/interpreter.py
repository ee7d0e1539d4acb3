"""How a child of ours is started: with the folders to import from that this process has, and no other."""

from __future__ import annotations

import sys
from pathlib import Path


def interpreter() -> list[str]:
    """Return the command of a Python like this one.

    `python -c` and `python -m` import from the current folder before any other. Where this process does not,
    as the script `torchloom` does not, its children must not either: the folder may be anybody's, /tmp for one.
    Python 3.10 has no way to say so.
    """
    imports_from_here = not {"", str(Path.cwd())}.isdisjoint(sys.path)
    if imports_from_here or sys.version_info < (3, 11):
        return [sys.executable]
    return [sys.executable, "-P"]
