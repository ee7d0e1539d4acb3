"""The tables of docs/config.md hold every key."""

from __future__ import annotations

from docs_pages.schema import render_reference
from torchloom.config.keys import known_paths


def test_every_key_is_on_the_page() -> None:
    rendered = render_reference()
    for path in known_paths():
        assert f"`{path.rpartition('.')[2]}`" in rendered
