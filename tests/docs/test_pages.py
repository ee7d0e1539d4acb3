"""Generated parts of the pages are as their sources say; marks, docstrings and commands are read."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer

from docs_pages.commands import _body, commands
from docs_pages.docstrings import parse
from docs_pages.lists import arguments
from docs_pages.marks import filled
from docs_pages.pages import PAGES, stale
from torchloom.cli import command_names
from torchloom.passes import PASSES


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_stale(page: str) -> None:
    assert stale(page) is None, "run: make docs-pages"


def test_every_pass_and_command_is_on_its_page() -> None:
    from docs_pages.passes import sections

    shown = sections()
    for name in PASSES:
        assert name in shown
    told = commands()
    for name in command_names():
        assert f"## torchloom {name}\n" in told


PAGE = "a\n<!-- begin: generated from x -->\nold\n<!-- end: generated from x -->\nb"


def test_only_what_is_between_marks_changes() -> None:
    new = filled(PAGE, {"x": lambda: "new"})
    assert new == PAGE.replace("old", "\nnew\n")
    assert filled(new, {"x": lambda: "new"}) == new


@pytest.mark.parametrize(("text", "parts"), [("a", {"x": str}), (PAGE, {})])
def test_missing_and_unknown_marks_are_refused(text: str, parts) -> None:
    with pytest.raises(ValueError, match="add or remove"):
        filled(text, parts)


def weave_more(gm, ctx, *, max_bytes: int = 3, **rest) -> int:
    """Merge what is near.

        before   a b
        after    ab

    Text after the block.

    Args:
        gm: the graph.
        max_bytes: bytes that may be merged, over
            two lines.
        rest: for others.

    Returns:
        How many.
    """


def test_docstrings_are_taken_apart() -> None:
    parsed = parse(weave_more.__doc__)
    assert parsed.summary == "Merge what is near."
    assert parsed.text == "```text\nbefore   a b\nafter    ab\n```\n\nText after the block."
    assert parsed.arguments["max_bytes"] == "bytes that may be merged, over two lines."


def test_options_come_from_signature_and_docstring() -> None:
    rows = arguments(weave_more, only_keywords=True).splitlines()
    assert rows == ["- `max_bytes` (`3`): Bytes that may be merged, over two lines."]
    assert "- `**rest`: For others." in arguments(weave_more, skip=("ctx",))
    with pytest.raises(ValueError, match="takes 'ctx'"):
        arguments(weave_more)


def command(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A file.")],
    size: Annotated[int, typer.Option("--size", "-s", help="A size.")] = 0,
    fast: Annotated[bool, typer.Option(help="Or slow.")] = True,
    words: Annotated[list[str] | None, typer.Argument(help="More.")] = None,
    name: Annotated[str | None, typer.Option(show_default="its own", help="A name.")] = None,
) -> None:
    """Do it."""


def test_commands_are_read_from_typer() -> None:
    usage, text, rows = _body("torchloom do", command)
    assert usage == "`torchloom do FILE [WORDS]...`"
    assert text == "Do it."
    assert rows.splitlines() == [
        "- `FILE`: A file.",
        "- `-s`, `--size 0`: A size.",
        "- `--fast/--no-fast` (on): Or slow.",
        "- `WORDS`: More.",
        "- `--name TEXT` (its own): A name.",
    ]
