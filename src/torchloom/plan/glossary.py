"""The glossary of docs/planning.md: each class of the rooms that plan, in one line.

`python -m torchloom.plan.glossary docs/planning.md` rewrites the part between the two marks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

BEGIN = "<!-- begin: generated from docstrings -->"
END = "<!-- end: generated from docstrings -->"
ROOMS = ("plan", "costs", "memory", "races")
_PACKAGE = Path(__file__).parents[1]


def render_glossary() -> str:
    """Return one table for each room, with the first line of each public class's docstring.

    Example:
        >>> "| `PlanCandidate` |" in render_glossary()
        True
    """
    return "\n\n".join(_table(room) for room in ROOMS)


def updated(page: str) -> str:
    """Return the page with the part between the marks rendered anew.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the marks {BEGIN!r} and {END!r}: add them")
    return f"{before}{BEGIN}\n\n{render_glossary()}\n\n{END}{after}"


def _table(room: str) -> str:
    rows = [f"| `{name}` | {line.replace('|', chr(92) + '|')} |" for name, line in _classes(room)]
    return "\n".join([f"### {room}", "", "| class | is |", "|---|---|", *sorted(rows)])


def _classes(room: str) -> Iterator[tuple[str, str]]:
    for path in (_PACKAGE / room).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, (ast.get_docstring(node) or "").partition("\n")[0]


def main(arguments: list[str]) -> None:
    """Rewrite the generated part of each page named."""
    for name in arguments:
        page = Path(name)
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
