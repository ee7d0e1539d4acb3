"""Import a user's Python file as a module, or run it as a script."""

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
