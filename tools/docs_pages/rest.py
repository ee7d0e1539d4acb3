"""Docstrings as reStructuredText: drawings become literal blocks, code between backticks stays code."""

from __future__ import annotations

import re

from docs_pages.docstrings import SECTION


def to_rest(docstring: str) -> str:
    """Return a docstring whose indented blocks are literal blocks and whose backticks are literals.

    Sections such as `Args:` are left to napoleon.

    Args:
        docstring: without common indentation.
    """
    found: list[str] = []
    in_section = in_block = False
    lines = docstring.splitlines()
    for at, line in enumerate(lines):
        if line and not line.startswith(" "):
            in_section, in_block = bool(SECTION.match(line)), False
        begins = line.startswith("    ") and (at == 0 or not lines[at - 1].strip())
        if begins and not in_section and not in_block:
            found += ["::", ""]
            in_block = True
        found.append(line if in_block else literals(line))
    return "\n".join(found)


def literals(line: str) -> str:
    """Return a line with each single backtick doubled, as code is marked in reStructuredText.

    Args:
        line: of a docstring.
    """
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
