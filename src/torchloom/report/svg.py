"""Builds a chart as SVG text: page, title, two axes with round ticks, legend.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ by dash, so that
a chart can be read in grey. A style in the chart replaces each colour by a dark counterpart where the reader's
system is dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
