"""The glossary of docs/planning.md: each class of the rooms that plan, in one line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torchloom

ROOMS = ("plan", "costs", "memory", "races")
_PACKAGE = Path(torchloom.__file__).parent


def render_glossary() -> str:
    """Return one table for each room, with the first line of each public class's docstring.

    Example:
        >>> "| `PlanCandidate` |" in render_glossary()
        True
    """
    return "\n\n".join(_table(room) for room in ROOMS)


def _table(room: str) -> str:
    rows = [f"| `{name}` | {line.replace('|', chr(92) + '|')} |" for name, line in _classes(room)]
    return "\n".join([f"### {room}", "", "| class | is |", "|---|---|", *sorted(rows)])


def _classes(room: str) -> Iterator[tuple[str, str]]:
    for path in (_PACKAGE / room).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, (ast.get_docstring(node) or "").partition("\n")[0]
