"""`python -m docs_pages` rewrites the generated parts of all pages and says which ones changed."""

from __future__ import annotations

import sys

from docs_pages.pages import DOCS, PAGES, stale


def main() -> None:
    """Rewrite each page that is stale."""
    for page in PAGES:
        wanted = stale(page)
        if wanted is not None:
            (DOCS / page).write_text(wanted, encoding="utf-8")
            sys.stdout.write(f"docs/{page} rewritten\n")


if __name__ == "__main__":
    main()
