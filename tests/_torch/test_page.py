"""docs/versions.md shows what differs between versions and what is patched."""

from __future__ import annotations

from docs_pages.private_names import render
from torchloom._torch.table import FACTS, PATCHES


def test_every_row_is_on_the_page():
    rendered = render()
    for row in PATCHES:
        assert f"`{row.name}`" in rendered
    for fact in FACTS:
        assert fact.differs in rendered
