"""`make house`: each measure is printed, and counts what it says."""

from __future__ import annotations

import importlib.util
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
ONE = '''
import torch._C

class PassContext:
    """What passes share."""

    stage: int
    world_size: int

class Twin: ...

def go(a, b, c):
    """Go."""
    global state
    if a:
        if b:
            raise ValueError
    elif c:
        pass
    session.plan = 1
    self.session.plan += 1
    try:
        a()
    except Exception:
        pass
    except BaseException:  # noqa: BLE001  anything may come out of a backend
        raise
'''
TWO = """
class Twin:
    x = 1

class CompileSession:
    def set(self, session):
        session.plan = 1
"""


def measure(folder: Path) -> dict[str, object]:
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    return house.measure(folder)


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


def test_measures_count_what_they_say(tmp_path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.py").write_text(ONE)
    (tmp_path / "two.py").write_text(TWO)
    found = measure(tmp_path)
    assert tuple(found) == MEASURES
    assert found["lines / files"] == f"{ONE.count(chr(10)) + TWO.count(chr(10))} / 2"
    assert found["deepest nesting"] == 2
    assert found["public, raise, no Raises"] == "1 of 1"
    assert found["public, 3+ arguments, no Args"] == "1 of 1"
    assert found["broad except / without a reason"] == "2 / 1"
    assert found["global statements"] == 1
    assert found["fields of PassContext"] == 2
    assert found["session attributes set from outside"] == 2
    assert found["files that import private torch"] == 1
    assert found["classes per room"] == "one 2, two 2"
    assert found["class names in two rooms"] == "Twin (one two)"
