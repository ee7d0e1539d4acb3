"""Version facts and patches of the table of private torch, as docs/versions.md shows them."""

from __future__ import annotations

from collections.abc import Iterable

from torchloom._torch.table import FACTS, PATCHES, Fact, Patch


def render() -> str:
    """Return the table as Markdown.

    Example:
        >>> "`torch.nn.Module.compile`" in render()
        True
    """
    return "\n\n".join(
        [
            "### What differs between versions",
            _table(("what is so", "torch"), map(_fact, FACTS)),
            "### What torchloom replaces or works around",
            _table(("of torch", "torch", "without it"), map(_patch, PATCHES)),
        ]
    )


def _patch(row: Patch) -> tuple[str, ...]:
    number = row.issue.rpartition("#")[2]
    link = f" ([#{number}](https://github.com/pytorch/pytorch/issues/{number}))"
    name = f"`{row.name}`" + (link if row.issue else "")
    return name, row.versions, row.without


def _fact(row: Fact) -> tuple[str, ...]:
    return row.differs, row.versions


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
