"""Links lead somewhere: files are there, headings are there, addresses have the form of one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.pages import DOCS, ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("http", "https"), link
            assert "." in parts.netloc, link
            continue
        target = page if not parts.path else (page.parent / parts.path).resolve()
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside of the project"
        if parts.fragment:
            assert target.suffix == ".md", link
            assert parts.fragment in anchors(target), f"{link}: no such heading"


def test_the_readme_leads_to_the_site() -> None:
    named = {(ROOT / link).resolve() for link in links(ROOT / "README.md") if ".md" in link}
    for page in ("tutorial.md", "howto/index.md", "migrating/index.md", "troubleshooting.md"):
        assert DOCS / page in named, page
