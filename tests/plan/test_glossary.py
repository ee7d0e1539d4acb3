"""docs/planning.md shows the classes that plan as they are, and each name stands for one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from torchloom.plan.glossary import ROOMS, render_glossary, updated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
RECORDED = {"Decision", "GraphPlan"}
"""A record on disk names these as the plan does."""


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")

    assert updated(page) == page, "run: python -m torchloom.plan.glossary docs/planning.md"


def test_each_class_has_its_line():
    rows = [line for line in render_glossary().splitlines() if line.startswith("| `")]

    assert len(rows) > 50
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_name_is_that_of_one_class():
    package, names, own = ROOT / "src" / "torchloom", Counter(), set()
    for path in package.rglob("*.py"):
        classes = [
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ClassDef)
        ]
        names.update(classes)
        if path.relative_to(package).parts[0] in ROOMS:
            own.update(classes)

    assert {name for name in own if names[name] > 1} == RECORDED


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="needs the marks"):
        updated("# nothing")
