"""docs/versions.md shows the table of private torch as it is."""

from __future__ import annotations

from docs_pages.private_names import render
from torchloom._torch.table import FACTS, NAMES, PATCHES


def test_every_row_is_on_the_page():
    rendered = render()
    for row in [*NAMES, *PATCHES]:
        assert f"`{row.name}`" in rendered
    for fact in FACTS:
        assert fact.differs in rendered
