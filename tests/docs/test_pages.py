"""Generated parts of the pages are as their sources say, and hold every pass and command."""

from __future__ import annotations

import pytest

from docs_pages.commands import commands
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
