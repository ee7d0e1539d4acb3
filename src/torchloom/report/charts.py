"""Draws line charts and bar charts as self-contained SVG text.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ by dash, so that
a chart can be read in grey. A style in the chart replaces each colour by a dark counterpart where the reader's
system is dark.

Example:
    >>> svg = line_chart([Series("loss", [1, 2, 3], [5.5, 4.0, 3.1])],
    ...                  title="Loss", x_label="step", y_label="nats per byte")
    >>> svg[:4]
    '<svg'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "5 2", "1 4", "12 4")
INK, FAINT, GRID, PAPER = "#222222", "#666666", "#E3E3E3", "#FFFFFF"
_DARK = {
    "#0072B2": "#4BA3DB",
    "#D55E00": "#EE8A3F",
    "#009E73": "#35B98F",
    "#CC79A7": "#DE93BC",
    "#56B4E9": "#8CCBEF",
    "#E69F00": "#E6B33E",
    "#000000": "#F4F6F8",
    INK: "#E3E6E9",
    FAINT: "#A2ABB3",
    GRID: "#363C42",
    PAPER: "#14171A",
}
"""The dark counterpart of each colour."""
_FONT = "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif\""
# Mean advance of a letter of the fonts above, as a part of the font size; measured on DejaVu Sans.
_LETTER = 0.58
_HEIGHT = 420
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Axis(NamedTuple):
    """A range of values laid over a range of pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: Sequence[float]
    is_log: bool = False

    def px(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)


def linear_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """Return an axis whose ends are round values that enclose `low` and `high`; one value is widened around it."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    ticks = _round_ticks(low, high, 6)
    return Axis(ticks[0], ticks[-1], start_px, end_px, ticks)


def tight_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """Return an axis that ends at `low` and `high`, with round ticks between them; of one value it spans 1."""
    if high <= low:
        high = low + 1
    slack = 1e-9 * (high - low)
    ticks = [t for t in _round_ticks(low, high, 8) if low - slack <= t <= high + slack]
    return Axis(low, high, start_px, end_px, ticks)


def log_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """Return a logarithmic axis of values above 0, with ticks at 1, 2 and 5 times powers of ten."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    marks = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    bottom = max(m for m in marks if m <= low)
    top = min((m for m in marks if m > low and m >= high), default=high)
    ticks = [m for m in marks if bottom <= m <= top]
    if len(ticks) > 9:
        ticks = [
            t for i, t in enumerate(marks) if t in (bottom, top) or (t in ticks and i % 3 == 0)
        ]
    return Axis(bottom, top, start_px, end_px, ticks, is_log=True)


def _round_ticks(low: float, high: float, number: int) -> list[float]:
    """Return about as many round values, the outer ones no further in than the ends."""
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """Return a tick's label; from ten thousand on the axis counts in k, M, G or T."""
    largest = max(abs(t) for t in ticks)
    for size, suffix in _SUFFIXES:
        if largest >= max(size, 1e4) and abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.6g}" if abs(value) > 1e-12 * largest else "0"


class Chart:
    """One chart that is drawn: a page that is wide enough for its legend, and the plot's edges in pixels.

    Args:
        labels: of the legend.
        min_width: of the page.
    """

    left, top, bottom = 76, 78, _HEIGHT - 58

    def __init__(self, labels: Sequence[str], min_width: int = 760) -> None:
        self._labels, self._parts = labels, []
        legend = sum(_key_width(label) for label in labels)
        self.width = max(min_width, self.left + math.ceil(legend))
        self.right = self.width - 24

    def add(self, element: str) -> None:
        """Draw an SVG element."""
        self._parts.append(element)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: int = 12,
        anchor: str = "start",
        fill: str = INK,
        more: str = "",
    ) -> None:
        """Write one line of text.

        Args:
            x: pixel of the anchor.
            y: pixel of the baseline.
            content: the text; it is escaped.
            size: font size in pixels.
            anchor: which part of the text lies at `x`: "start", "middle" or "end".
            fill: colour.
            more: attributes.
        """
        self.add(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{fill}"{more}>{escape(content)}</text>'
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], stroke: str = INK) -> None:
        """Draw a straight line between two points."""
        (x1, y1), (x2, y2) = start, end
        points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.add(f'<line {points} stroke="{stroke}"/>')

    def y_axis(self, axis: Axis, label: str) -> None:
        """Draw grid lines, their values and the axis label."""
        for tick in axis.ticks:
            y = axis.px(tick)
            self.line((self.left, y), (self.right, y), GRID)
            told = tick_text(tick, axis.ticks)
            self.text(self.left - 8, y + 4, told, anchor="end", fill=FAINT)
        middle = (self.top + self.bottom) / 2
        turn = f' transform="rotate(-90 20 {middle:.1f})"'
        self.text(20, middle, label, anchor="middle", size=13, more=turn)

    def x_axis(self, axis: Axis, label: str) -> None:
        """Draw ticks, their values and the axis label."""
        for tick in axis.ticks:
            x = axis.px(tick)
            self.line((x, self.bottom), (x, self.bottom + 5))
            told = tick_text(tick, axis.ticks)
            self.text(x, self.bottom + 19, told, anchor="middle", fill=FAINT)
        center = (self.left + self.right) / 2
        self.text(center, _HEIGHT - 14, label, anchor="middle", size=13)

    def document(self, title: str, note: str, keys: Sequence[str]) -> str:
        """Return the whole SVG document.

        Args:
            title: heading of the chart, and the document's title for screen readers.
            note: a second line under the title; empty for none.
            keys: SVG elements of the legend, one for each label, drawn in a box of 26 by 10 pixels.
        """
        x = float(self.left)
        for label, key in zip(self._labels, keys, strict=True):
            self.add(f'<g transform="translate({x:.1f} {self.top - 22})">{key}</g>')
            self.text(x + 32, self.top - 12, label)
            x += _key_width(label)
        self.text(self.left, 26, title, size=16, more=' font-weight="bold"')
        self.text(self.left, 45, note, fill=FAINT)
        self.line((self.left, self.bottom), (self.right, self.bottom))
        # Rules win over the attributes of shapes.
        rules = "".join(
            f'[{what}="{light}"]{{{what}:{dark}}}'
            for light, dark in _DARK.items()
            for what in ("fill", "stroke")
        )
        size = f'width="{self.width}" height="{_HEIGHT}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {_HEIGHT}" role="img" {_FONT}>\n'
            f"<title>{escape(title)}</title>\n"
            f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"
            f'<rect {size} fill="{PAPER}"/>'
        )
        return "\n".join([head, *self._parts, "</svg>\n"])


def _key_width(label: str) -> float:
    return 32 + 12 * _LETTER * len(label) + 22


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
