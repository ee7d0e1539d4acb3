"""Each name of the rooms that plan stands for one class."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("plan", "costs", "memory", "races")
RECORDED = {"Decision", "GraphPlan"}
"""A record on disk names these as the plan does."""


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
