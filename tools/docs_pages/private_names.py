"""The rows of the table of private torch, as docs/versions.md shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from torchloom._torch.table import AREAS, FACTS, PATCHES, Fact, Patch, PrivateName


def render() -> str:
    """Return the table as Markdown.

    Example:
        >>> "`torch._dynamo.reset`" in render()
        True
    """
    return "\n\n".join(
        [
            "### What differs between versions",
            _table(("what is so", "torch", "how torchloom knows"), map(_fact, FACTS)),
            "### What torchloom replaces or works around",
            _table(
                ("of torch", "torch", "because", "upstream", "without it"), map(_patch, PATCHES)
            ),
            "### Private names",
            *[part for area, rows in AREAS.items() for part in _area(area, rows)],
        ]
    )


def _area(area: str, rows: Iterable[PrivateName]) -> Iterator[str]:
    yield f"#### {area[0].upper()}{area[1:]}"
    yield _table(("name", "torch", "used for", "where it is missing"), _names(rows))


def _names(rows: Iterable[PrivateName]) -> Iterator[tuple[str, ...]]:
    """Yield one line for rows that follow each other and differ in their names alone."""

    def common(row: PrivateName) -> tuple[str, ...]:
        return (row.versions, row.used_for, row.without)

    for rest, alike in groupby(rows, common):
        yield ", ".join(f"`{row.name}`" for row in alike), *rest


def _patch(row: Patch) -> tuple[str, ...]:
    number = row.issue.rpartition("#")[2]
    link = f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})"
    upstream = link if row.issue else f"no upstream issue known; to see it: {row.reproduction}"
    return f"`{row.name}`", row.versions, row.because, upstream, row.without


def _fact(row: Fact) -> tuple[str, ...]:
    return row.differs, row.versions, f"{row.detected} (`{row.name.removeprefix('torchloom.')}`)"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )
