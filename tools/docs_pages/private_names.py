"""Version facts and patches of the table of private torch, as docs/versions.md shows them."""

from __future__ import annotations

from docs_pages.lists import listed
from torchloom._torch.table import FACTS, PATCHES, Patch


def render() -> str:
    """Return both lists as Markdown.

    Example:
        >>> "`torch.nn.Module.compile`" in render()
        True
    """
    return "\n\n".join(
        [
            "### What differs between versions",
            "\n".join(f"- {row.versions}: {row.differs}" for row in FACTS),
            "### What torchloom replaces or works around",
            "Each name is followed by its versions of torch and by what happens without it.",
            listed(map(_patch, PATCHES)),
        ]
    )


def _patch(row: Patch) -> tuple[str, str, str]:
    number = row.issue.rpartition("#")[2]
    link = f" ([#{number}](https://github.com/pytorch/pytorch/issues/{number}))"
    name = f"`{row.name}`" + (link if row.issue else "")
    return name, row.versions, row.without
