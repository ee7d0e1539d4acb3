"""Import a user's Python file as a module."""

from __future__ import annotations

import importlib.util
import sys
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
