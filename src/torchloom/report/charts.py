"""Line charts and bar charts as self-contained SVG text.

Example:
    >>> svg = line_chart([Series("loss", [1, 2, 3], [5.5, 4.0, 3.1])],
    ...                  title="Loss", x_label="step", y_label="nats per byte")
    >>> svg[:4]
    '<svg'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchloom.report.axes import Axis, linear_axis, log_axis, tight_axis, value_text
from torchloom.report.svg import (
    DASHES,
    INK,
    PALETTE,
    PAPER,
    Frame,
    document,
    legend,
    line,
    page_width,
    text,
    x_axis,
    y_axis,
)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. Points that are not finite leave a gap."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_markers: bool = False
    """Mark each point: for series of a few points."""
    beside: Sequence[tuple[float, float]] = ()
    """Points (x, y) that the line does not go through, marked by hollow circles."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value; `low` and `high` are the ends of its error bar."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class BarGroup:
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
    points = [_finite_points(s.xs, s.ys) for s in series]
    beside = [[p for p in s.beside if all(map(math.isfinite, p))] for s in series]
    xs = [x for shown in (*points, *beside) for x, _ in shown]
    ys = [y for shown in (*points, *beside) for _, y in shown]
    if not xs:
        raise ValueError(f"chart {title!r} has no finite point to draw")
    if log_y and min(ys) <= 0:
        raise ValueError(f"chart {title!r}: a logarithmic axis needs values above 0")
    frame = Frame(width=page_width([s.label for s in series]))
    x = tight_axis(min(xs), max(xs), *frame.x_range)
    y = (log_axis if log_y else linear_axis)(min(ys), max(ys), *frame.y_range)
    body = [*y_axis(frame, y, y_label), *x_axis(frame, x, x_label)]
    for i, one in enumerate(series):
        body.append(_polyline(one, x, y, i))
        if one.has_markers:
            body += [_marker(x.px(a), y.px(b), i) for a, b in points[i]]
        body += [_marker(x.px(a), y.px(b), i, is_hollow=True) for a, b in beside[i]]
    body += legend(
        frame, [s.label for s in series], [_line_key(s, i) for i, s in enumerate(series)]
    )
    return document(frame, title, note, body)


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
    tops = [top for g in groups for b in g.bars if b for top in (b.value, b.high) if top]
    if not tops:
        raise ValueError(f"chart {title!r} has no bar above zero to draw")
    needed = 60 + 34 * len(categories) * len(groups)
    frame = Frame(width=max(needed, page_width([g.label for g in groups])))
    y = linear_axis(0.0, max(tops), *frame.y_range)
    left, right = frame.x_range
    slot = (right - left) / len(categories)
    width = min(64.0, 0.8 * slot / len(groups))
    body = y_axis(frame, y, y_label)
    for c, category in enumerate(categories):
        center = left + (c + 0.5) * slot
        for i, group in enumerate(groups):
            bar = group.bars[c]
            if bar is not None:
                body += _bar(bar, center + (i - len(groups) / 2) * width, width, y, i)
        body.append(text(center, frame.y_range[0] + 20, category, anchor="middle", size=13))
    body.append(line(left, frame.y_range[0], right, frame.y_range[0], INK))
    keys = [f'<rect x="6" width="14" height="11" fill="{PALETTE[i]}"/>' for i in range(len(groups))]
    body += legend(frame, [g.label for g in groups], keys)
    return document(frame, title, note, body)


def _check_count(count: int) -> None:
    if not 1 <= count <= len(PALETTE):
        raise ValueError(f"a chart shows 1 to {len(PALETTE)} series, got {count}: draw several")


def _finite_points(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    pairs = zip(xs, ys, strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def _polyline(series: Series, x: Axis, y: Axis, index: int) -> str:
    commands, pen_down = [], False
    for a, b in zip(series.xs, series.ys, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x.px(a):.1f} {y.px(b):.1f}")
        pen_down = True
    return (
        f'<path d="{" ".join(commands)}" fill="none" stroke="{PALETTE[index]}" '
        f'stroke-width="2" stroke-linejoin="round" stroke-dasharray="{DASHES[index]}"/>'
    )


def _line_key(series: Series, index: int) -> str:
    stroke = f'stroke="{PALETTE[index]}" stroke-width="2" stroke-dasharray="{DASHES[index]}"'
    key = f'<line x1="0" y1="6" x2="26" y2="6" {stroke}/>'
    return key + _marker(13, 6, index) if series.has_markers else key


def _marker(x: float, y: float, index: int, *, is_hollow: bool = False) -> str:
    fill, stroke = (PAPER, PALETTE[index]) if is_hollow else (PALETTE[index], PAPER)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{2 if is_hollow else 1}"/>'
    )


def _bar(bar: Bar, x: float, width: float, y: Axis, index: int) -> list[str]:
    top, base, center = y.px(bar.value), y.px(0.0), x + width / 2
    parts = [
        f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
        f'height="{base - top:.1f}" fill="{PALETTE[index]}"/>'
    ]
    label_y = top
    if bar.low is not None and bar.high is not None:
        low, high = y.px(bar.low), y.px(bar.high)
        parts.append(line(center, low, center, high, INK, 1.5))
        parts += [line(center - 5, end, center + 5, end, INK, 1.5) for end in (low, high)]
        label_y = min(top, high)
    parts.append(text(center, label_y - 6, value_text(bar.value), anchor="middle", size=11))
    return parts
