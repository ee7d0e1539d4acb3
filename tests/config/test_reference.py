"""docs/config.md shows the schema as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom.config.keys import known_paths
from torchloom.config.reference import render_reference, updated

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")

    assert updated(page) == page, "run: python -m torchloom.config.reference docs/config.md"


def test_every_key_is_on_the_page():
    rendered = render_reference()

    for path in known_paths():
        assert f"`{path.rpartition('.')[2]}`" in rendered


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="needs the marks"):
        updated("# nothing")
