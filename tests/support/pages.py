"""Pages of the documentation, taken apart: blocks of code with their marks, links, headings.

A comment above a block says what tests do with it:

    <!-- program: NAME; ranks: 2; with: SETUP -->   a part of a program, run on 1 or 2 ranks; blocks of one
                                                    name follow each other; SETUP is a file of tests/docs/setups
    <!-- file: NAME -->                             a file in the folder in which programs of the page run
    <!-- not run: WHY -->                           compiled, its names looked up, not run
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"<!-- (program|file|not run): (.*?) -->\s*\Z")
_CODE = re.compile(r"`[^`\n]+`")


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    """"program", "file", "not run", or "" without a mark."""
    value: str
    """What follows the mark's colon."""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def option(self, name: str, default: str = "") -> str:
        """Return an option of a mark, as `ranks` in "NAME; ranks: 2"."""
        found = re.search(rf"; {name}: ([^;]+)", self.value)
        return found[1].strip() if found else default


BESIDE = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "bench/README.md")


def pages() -> list[Path]:
    """Return all pages of the site, and the pages beside it."""
    own = [path for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    return sorted([*own, *(ROOT / name for name in BESIDE)])


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        yield Block(
            page,
            text.count("\n", 0, match.start()) + 2,
            match["language"].strip(),
            textwrap.dedent(match["body"]),
            mark[1] if mark else "",
            mark[2] if mark else "",
        )


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def codes(text: str) -> list[str]:
    """Return what stands between single backticks."""
    return [each[1:-1] for each in _CODE.findall(text)]


def links(page: Path) -> list[str]:
    """Return the targets of all links."""
    return re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """Return what `#...` may name in a page: its headings, as GitHub and MyST shorten them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,4} (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = 0
        while (name := f"{slug}-{count}" if count else slug) in found:
            count += 1
        found.add(name)
    return found
