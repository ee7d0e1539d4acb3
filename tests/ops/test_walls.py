"""Rooms below `runtime` import nothing of torchloom by a string: import-linter cannot see such imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torchloom

ROOT = Path(torchloom.__file__).parent
ROOMS = ["passes", "pipeline", "capture", "ops", "plan", "deepcompile", "graph", "custom_ops"]
IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name", "run_module", "exec"}


def name_of(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def names_torchloom(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and "torchloom" in each.value
        for each in ast.walk(node)
    )


def imports_by_string(source: str) -> list[int]:
    """Return the lines where a function that imports is called with the name of a torchloom module.

    A name that is not written in the call, such as a variable, counts where the file writes the name of
    a torchloom module anywhere outside of its import statements and docstrings.
    """
    tree = ast.parse(source)
    module_names = {
        each.value
        for each in ast.walk(tree)
        if isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and each.value.startswith("torchloom.")
        and each.value.replace(".", "").isidentifier()
    }
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and name_of(call.func) in IMPORTERS
        and (names_torchloom(call) or module_names)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_imported_by_a_string(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {str(file): imports_by_string(file.read_text()) for file in files}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        'import_module("torchloom.runtime")',
        'importlib.import_module("torchloom.runtime.bodies").bind()',
        '__import__("torchloom.runtime")',
        'import_module(f"torchloom.{room}")',
        'NAME = "torchloom.runtime"\nimport_module(NAME)',
    ],
)
def test_such_an_import_is_found(source: str) -> None:
    assert imports_by_string(source)
