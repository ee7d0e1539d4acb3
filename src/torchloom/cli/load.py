"""Running Python: a user's file as a module or as a script, and a child that imports from the same folders."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from torchloom.errors import TorchloomError


def load_file(path: str | Path) -> ModuleType:
    """Import a file under its stem, with its folder on `sys.path`.

    Raises:
        TorchloomError: there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise TorchloomError(f"there is no file {str(path)!r}: write FILE.py:function")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module


def run_script(file: Path, arguments: Sequence[str]) -> None:
    """Run a file as `python FILE ARGUMENTS` does."""
    before = sys.argv
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = before
        sys.path.pop(0)


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
