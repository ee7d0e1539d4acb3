"""The command line of a child Python that imports from the same folders as this process."""

from __future__ import annotations

import sys
from pathlib import Path


def interpreter() -> list[str]:
    """Return the command of a Python like this one.

    `python -c` and `python -m` import from the current folder first. If this process does not, as the
    script `torchloom` does not, its children must not either: others may be able to write to that
    folder, such as /tmp. Python 3.10 has no option for that.
    """
    imports_from_here = not {"", str(Path.cwd())}.isdisjoint(sys.path)
    if imports_from_here or sys.version_info < (3, 11):
        return [sys.executable]
    return [sys.executable, "-P"]
