"""Elements of which views of the page consist, as plain data, and the words for numbers in them.

A node is text, `[tag, *children]` with a tag as `p.told`, or `{"is": name, ...}`, which a component of the page's
script draws. Texts of a record stay texts: the script makes no markup of them. What has nothing to show is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

Node = str | list[Any] | dict[str, Any] | None


def el(tag: str, *children: Node) -> list[Any]:
    """Return an element; children that are None or empty are left out."""
    return [tag, *(child for child in children if child)]


def link(address: str, *children: Node) -> list[Any]:
    """Return a link to a view of the page."""
    return ["a", address, *children]


def section(title: str, *children: Node, none: str = "") -> Node:
    """Return a part of a view under its heading; one without content says `none`, or is left out."""
    shown = [child for child in children if child]
    if shown or none:
        return ["section", ["h2", title], *(shown or [empty(none)])]
    return None


def empty(text: str) -> list[Any]:
    """Return the sentence that stands where there is nothing to show."""
    return ["p.empty", text]


def told(*text: Node) -> list[Any]:
    """Return a sentence about what stands below it."""
    return ["p.told", *text]


def table(columns: Sequence[str], rows: Sequence[Sequence[Node]], name: str = "") -> Node:
    """Return a table; names of columns of numbers begin with `#`."""
    return {"is": "Table", "columns": columns, "rows": rows, "name": name} if rows else None


def pairs(rows: Iterable[tuple[Node, Node]], name: str = "") -> Node:
    """Return names with their values, without those that have none."""
    kept = [["div", ["dt", key], ["dd", value]] for key, value in rows if value]
    return [f"dl{name}", *kept] if kept else None


def choice(label: str, options: Sequence[tuple[str, Node]], first: int = -1) -> Node:
    """Return several nodes of which the reader picks one; a single one stands alone."""
    if len(options) == 1:
        return options[0][1]
    shown = first % len(options)
    return {"is": "Choice", "label": label, "options": [list(o) for o in options], "first": shown}


def stacked(
    parts: Sequence[tuple[str, float, str, str]],
    label: str,
    columns: tuple[str, str],
    limit: tuple[float, str] | None = None,
    is_bytes: bool = False,
) -> Node:
    """Return a bar of parts over the table that names them.

    Args:
        parts: name, value, colour and note of each; those without a value are left out.
        label: of the bar.
        columns: names of the first two columns.
        limit: a value and its name, marked on the bar.
        is_bytes: the values are bytes, not seconds.
    """
    show = size if is_bytes else seconds
    shown = [part for part in parts if part[1] > 0]
    total = sum(value for _, value, _, _ in shown)
    whole = max(total, limit[0] if limit else 0) or 1
    rows: list[list[Node]] = [
        [["", [f"span.swatch.{color}"], name], show(v), percent(v, total), ["span.faint", note]]
        for name, v, color, note in shown
    ]
    bar = {
        "is": "Stacked",
        "label": f"{label}: {show(total)}",
        "parts": [[100 * v / whole, color, f"{name}: {show(v)}"] for name, v, color, _ in shown],
        "limit": [100 * limit[0] / whole, limit[1]] if limit else None,
    }
    return ["", bar, table([columns[0], f"#{columns[1]}", "#share", "what it is"], rows, "parts")]


def prose(text: str) -> list[Any]:
    """Return a sentence with what stands in backticks as code."""
    parts = re.split(r"`([^`]+)`", text)
    return ["", *(["code", part] if i % 2 else part for i, part in enumerate(parts))]


def few(shown: Sequence[str], most: int = 4) -> str:
    """Return the first of several texts on one line."""
    return ", ".join([*shown[:most], *(["..."] if len(shown) > most else [])])


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    near = abs(value)
    if not math.isfinite(value):
        return "unknown"
    if near == 0:
        return "0 s"
    if near < 1e-3:
        return f"{value * 1e6:.{1 if near < 1e-4 else 0}f} µs"
    if near < 1:
        return f"{value * 1e3:.{2 if near < 0.01 else 1 if near < 0.1 else 0}f} ms"
    return f"{value:.{2 if near < 10 else 1}f} s"


def size(value: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.{1 if abs(value) < 100 and units[0] != 'B' else 0}f} {units[0]}"


def rounded(value: float) -> str:
    """Return a number with three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def percent(part: float, whole: float) -> str:
    """Return a share as text."""
    return f"{100 * part / (whole or 1):.1f}%"


def number(value: Any) -> float | None:
    """Return a finite number as it is, None for anything else: records may be anybody's files."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2.0**63 else None
