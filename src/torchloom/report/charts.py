"""Line charts and bar charts as self-contained SVG text.

Example:
    >>> svg = line_chart([Series("loss", [1, 2, 3], [5.5, 4.0, 3.1])],
    ...                  title="Loss", x_label="step", y_label="nats per byte")
    >>> svg[:4]
    '<svg'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchloom.report.svg import DASHES, PALETTE, PAPER, Chart, linear_axis, log_axis, tight_axis

Point = tuple[float, float]


class Series(NamedTuple):
    """One line of a chart. Points that are not finite leave a gap."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_markers: bool = False
    """Mark each point: for series of a few points."""
    beside: Sequence[Point] = ()
    """Points (x, y) that the line does not go through, marked by hollow circles."""


class Bar(NamedTuple):
    """A measured value; `low` and `high` are the ends of its error bar."""

    value: float
    low: float | None = None
    high: float | None = None


class BarGroup(NamedTuple):
    """One colour of a bar chart: a bar per category, `None` where nothing was measured."""

    label: str
    bars: Sequence[Bar | None]


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    note: str = "",
    log_y: bool = False,
) -> str:
    """Draw values over a common x axis.

    Args:
        series: the lines, at most as many as the palette has colours.
        title: what is shown.
        x_label: name and unit of the x axis.
        y_label: name and unit of the y axis.
        note: a second line under the title.
        log_y: use a logarithmic y axis, for values above zero.

    Raises:
        ValueError: there is no finite point, too many series, or a value that has no logarithm.
    """
    _check_count(len(series))
    points = [list(zip(one.xs, one.ys, strict=True)) for one in series]
    shown = [
        *_finite(p for each in points for p in each),
        *_finite(p for s in series for p in s.beside),
    ]
    if not shown:
        raise ValueError(f"chart {title!r} has no finite point to draw")
    xs, ys = zip(*shown, strict=True)
    if log_y and min(ys) <= 0:
        raise ValueError(f"chart {title!r}: a logarithmic axis needs values above 0")
    chart = Chart([one.label for one in series])
    x = tight_axis(min(xs), max(xs), chart.left, chart.right)
    y = (log_axis if log_y else linear_axis)(min(ys), max(ys), chart.bottom, chart.top)
    chart.y_axis(y, y_label)
    chart.x_axis(x, x_label)
    keys = []
    for i, one in enumerate(series):
        stroke = f'stroke="{PALETTE[i]}" stroke-width="2" stroke-dasharray="{DASHES[i]}"'
        path, command = "", "M"
        for point in points[i]:
            command = command if _finite([point]) else "M"
            if _finite([point]):
                path += f"{command}{x.px(point[0]):.1f} {y.px(point[1]):.1f} "
                command = "L"
        chart.add(f'<path d="{path}" fill="none" stroke-linejoin="round" {stroke}/>')
        keys.append(f'<line x1="0" y1="6" x2="26" y2="6" {stroke}/>')
        if one.has_markers:
            keys[i] += _marker(13, 6, PALETTE[i], PAPER)
        for a, b in _finite(points[i]) if one.has_markers else ():
            chart.add(_marker(x.px(a), y.px(b), PALETTE[i], PAPER))
        for a, b in _finite(one.beside):
            chart.add(_marker(x.px(a), y.px(b), PAPER, PALETTE[i]))
    return chart.document(title, note, keys)


def bar_chart(
    categories: Sequence[str],
    groups: Sequence[BarGroup],
    *,
    title: str,
    y_label: str,
    note: str = "",
) -> str:
    """Draw grouped bars from zero, each with its value and its error bar.

    Args:
        categories: the places along the x axis.
        groups: one colour each; every group has one bar or `None` per category.
        title: what is shown.
        y_label: name and unit of the values.
        note: a second line under the title, for instance what the error bars are.

    Raises:
        ValueError: nothing to draw, too many groups, or a group of another length.
    """
    _check_count(len(groups))
    if any(len(g.bars) != len(categories) for g in groups):
        raise ValueError(f"chart {title!r}: each group needs {len(categories)} bars")
    tops = [top for g in groups for bar in g.bars if bar for top in (bar.value, bar.high) if top]
    if not tops:
        raise ValueError(f"chart {title!r} has no bar above zero to draw")
    needed = 60 + 34 * len(categories) * len(groups)
    chart = Chart([g.label for g in groups], max(760, needed))
    y = linear_axis(0.0, max(tops), chart.bottom, chart.top)
    chart.y_axis(y, y_label)
    slot = (chart.right - chart.left) / len(categories)
    width = min(64.0, 0.8 * slot / len(groups))
    for c, category in enumerate(categories):
        center = chart.left + (c + 0.5) * slot
        chart.text(center, chart.bottom + 20, category, anchor="middle", size=13)
        for i, group in enumerate(groups):
            if bar := group.bars[c]:
                x = center + (i - len(groups) / 2 + 0.5) * width
                high = _error_bar(chart, bar, x, [y.px(each or 0.0) for each in bar], width, i)
                chart.text(x, high - 6, _value_text(bar.value), anchor="middle", size=11)
    keys = [
        f'<rect x="6" width="14" height="11" fill="{fill}"/>' for fill in PALETTE[: len(groups)]
    ]
    return chart.document(title, note, keys)


def _error_bar(
    chart: Chart, bar: Bar, x: float, px: Sequence[float], width: float, i: int
) -> float:
    """Draw a bar with its error; return the pixel of its highest point."""
    top, low, high = px
    chart.add(
        f'<rect x="{x - width / 2 + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
        f'height="{chart.bottom - top:.1f}" fill="{PALETTE[i]}"/>'
    )
    if bar.low is None or bar.high is None:
        return top
    chart.line((x, low), (x, high))
    for end in (low, high):
        chart.line((x - 5, end), (x + 5, end))
    return min(top, high)


def _check_count(count: int) -> None:
    if not 1 <= count <= len(PALETTE):
        raise ValueError(f"a chart shows 1 to {len(PALETTE)} series, got {count}: draw several")


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _marker(x: float, y: float, fill: str, stroke: str) -> str:
    width = 2 if fill == PAPER else 1
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"'
    return f'{circle} stroke="{stroke}" stroke-width="{width}"/>'


def _value_text(value: float) -> str:
    """Return a value with three significant digits and no exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
