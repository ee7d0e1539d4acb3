"""New processes that see the models of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def command(code: str, *args: object) -> list[str]:
    """Return the command that runs code with arguments."""
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a process that finds these tests."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def run(code: str, *args: object, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run code to its end, with variables of its own; it has to succeed."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(
        command(code, *args), env=environment(**more), cwd=cwd, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done
