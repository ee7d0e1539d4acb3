"""The rows of the table of private torch, as docs/versions.md shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
            _table(("what is so", "torch"), map(_fact, FACTS)),
            "### What torchloom replaces or works around",
            _table(("of torch", "torch", "without it"), map(_patch, PATCHES)),
            "### Private names",
            *[part for area, rows in AREAS.items() for part in _area(area, rows)],
        ]
    )


def _area(area: str, rows: Iterable[PrivateName]) -> Iterator[str]:
    yield f"#### {area[0].upper()}{area[1:]}"
    yield _table(("without it", "names"), _names(rows))


def _names(rows: Iterable[PrivateName]) -> Iterator[tuple[str, str]]:
    """Yield one line for rows whose lack has the same effect."""
    by_effect: dict[str, list[str]] = {}
    for row in rows:
        versions = "" if row.versions == "all" else f" ({row.versions})"
        by_effect.setdefault(row.without, []).append(f"`{row.name}`{versions}")
    for without, names in by_effect.items():
        yield without, ", ".join(names)


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
