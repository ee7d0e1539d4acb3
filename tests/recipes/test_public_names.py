"""Recipes use public names of torchloom alone; what they import of it is exported by name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import torchloom

FOLDER = Path(torchloom.__file__).parent / "recipes"
FILES = sorted(FOLDER.rglob("*.py"))
PUBLIC = (
    *("torchloom.config", "torchloom.errors", "torchloom.events", "torchloom.records"),
    *("torchloom.report", "torchloom.files"),
)
"""Documented packages beside `torchloom` itself, and the one writer of files."""


def imported(file: Path) -> list[tuple[str, str]]:
    """Return (module, name) of each import from torchloom but not from recipes."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return [
        (module, name)
        for module, name in found
        if module.split(".")[0] == "torchloom" and not module.startswith("torchloom.recipes")
    ]


def attributes(file: Path) -> set[str]:
    """Return what a file reads as `torchloom.NAME`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torchloom"
    }


def exported(module: str) -> set[str]:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [n for n in vars(loaded) if not n.startswith("_")]
    return set(names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_recipes_import_public_names_alone(file: Path) -> None:
    for module, name in imported(file):
        assert module in ("torchloom", *PUBLIC), f"{file.name}: {module} is private"
        assert not name or name in exported(module), f"{file.name}: {module}.{name} is private"
    assert attributes(file) <= set(torchloom.__all__)
