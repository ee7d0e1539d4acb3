"""docs/versions.md shows the table of private torch as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom._torch.table import FACTS, NAMES, PATCHES
from torchloom._torch.table.page import render, updated

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert updated(page) == page, "run: python -m torchloom._torch.table.page docs/versions.md"


def test_every_row_is_on_the_page():
    rendered = render()
    for row in [*NAMES, *PATCHES]:
        assert f"`{row.name}`" in rendered
    for fact in FACTS:
        assert fact.differs in rendered


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="needs the marks"):
        updated("# nothing")
