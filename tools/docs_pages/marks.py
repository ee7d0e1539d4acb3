"""Marks in a page, and what is between them.

<!-- begin: generated from SOURCE --> ... <!-- end: generated from SOURCE -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_BLOCK = re.compile(
    r"<!-- begin: generated from (?P<source>.+?) -->.*?<!-- end: generated from (?P=source) -->",
    re.DOTALL,
)


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with each generated part made anew.

    Args:
        text: the page.
        parts: how to make each part, by the source that its marks name.

    Raises:
        ValueError: the page lacks the marks of a part, or has marks of an unknown one.
    """
    found = [match["source"] for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(parts):
        raise ValueError(
            f"the page has marks for {sorted(found)} and needs them for {sorted(parts)}: add or "
            "remove <!-- begin: generated from SOURCE --> and <!-- end: generated from SOURCE -->"
        )

    def made(match: re.Match[str]) -> str:
        source = match["source"]
        body = parts[source]().strip()
        begin = f"<!-- begin: generated from {source} -->"
        return f"{begin}\n\n{body}\n\n<!-- end: generated from {source} -->"

    return _BLOCK.sub(made, text)
