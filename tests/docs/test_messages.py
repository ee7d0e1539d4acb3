"""Every text that a page quotes as an error is one of the source."""

from __future__ import annotations

import ast
import errno
import os
import re

import pytest

from support.pages import DOCS, ROOT, prose

OF_THE_SYSTEM = {os.strerror(errno.ENOSPC), os.strerror(errno.EACCES)}
PLACE = "\0"
"""Where a message holds a value."""


def messages() -> list[str]:
    """Return the texts of the source, with `PLACE` for values."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            _text(node)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in docstrings
        ]
    return [re.sub(r"%[\w.]*[sdrgf]", PLACE, text) for text in found if " " in text]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return PLACE


def quoted(text: str) -> list[str]:
    """Return the texts in quotes of the first cells of tables."""
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    return [
        quote for row in rows for quote in re.findall(r'"([^"]{9,})"', re.sub(r"``?", "`", row))
    ]


@pytest.fixture(scope="module")
def source() -> list[str]:
    return messages()


@pytest.mark.parametrize(
    "page", ["troubleshooting.md", "checkpoints.md", "ragged.md", "howto/restarts.md"]
)
def test_quoted_messages_are_those_of_the_source(page, source) -> None:
    text = prose(DOCS / page)
    quotes = quoted(text)
    assert len(quotes) > 3
    unknown = []
    for quote in quotes:
        parts = [re.escape(part.strip()) for part in quote.split("...") if part.strip()]
        wanted = re.compile(".*".join(parts), re.DOTALL)
        if quote not in OF_THE_SYSTEM and not any(map(wanted.search, source)):
            unknown.append(quote)
    assert not unknown
