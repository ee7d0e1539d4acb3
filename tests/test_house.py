"""`make house`: each measure of a folder is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "house.py"
MEASURES = (
    *("lines / files", "function lines, median / p90 / max", "deepest nesting", "classes"),
    *("files over 300 lines", "annotated", "comments per 100 lines of code"),
    *("docstring lines per 100", "public, raise, no Raises", "public, 3+ arguments, no Args"),
    *("broad except / without a reason", "global statements", "fields of PassContext"),
    *("session attributes set from outside", "files that import private torch"),
    *("lines per room", "classes per room", "class names in two rooms"),
)


def test_every_measure_of_the_source_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "src/torchloom/memory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, *rows = done.stdout.splitlines()
    assert folder == "src/torchloom/memory"
    assert tuple(row[2:38].rstrip() for row in rows) == MEASURES
    assert all(row[39:].strip() for row in rows)
