"""The parts that all charts share, as SVG text: page, title, two axes, legend.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ by dash, so that
a chart can be read in grey. A style in the chart replaces each colour by a dark counterpart where the reader's
system is dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torchloom.report.axes import Axis, tick_text

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "5 2", "1 4", "12 4")
INK, FAINT, GRID = "#222222", "#666666", "#E3E3E3"
PAPER = "#FFFFFF"
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


@dataclass(frozen=True, slots=True)
class Frame:
    """The page and the plotting area inside it, in pixels."""

    width: int = 760
    height: int = 420
    left: int = 76
    right: int = 24
    top: int = 78
    bottom: int = 58

    @property
    def x_range(self) -> tuple[int, int]:
        """Return the pixels of the plot's left and right edge."""
        return self.left, self.width - self.right

    @property
    def y_range(self) -> tuple[int, int]:
        """Return the pixels of the plot's bottom and top edge."""
        return self.height - self.bottom, self.top


def document(frame: Frame, title: str, note: str, body: Sequence[str]) -> str:
    """Return a whole SVG document.

    Args:
        frame: page and plotting area.
        title: heading of the chart, and the document's title for screen readers.
        note: a second line under the title; empty for none.
        body: SVG elements of the plot.
    """
    size = f'width="{frame.width}" height="{frame.height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {frame.width} {frame.height}" role="img" {_FONT}>',
        f"<title>{escape(title)}</title>",
        _dark_style(),
        f'<rect {size} fill="{PAPER}"/>',
        text(frame.left, 26, title, size=16, weight="bold"),
    ]
    if note:
        head.append(text(frame.left, 45, note, size=12, fill=FAINT))
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _dark_style() -> str:
    """Return a style that replaces colours: rules win over the attributes of shapes."""
    rules = [
        f'[{what}="{light}"]{{{what}:{dark}}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    ]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def text(
    x: float,
    y: float,
    content: str,
    *,
    size: int = 12,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "normal",
) -> str:
    """Return one line of text as an SVG element.

    Args:
        x: pixel of the anchor.
        y: pixel of the baseline.
        content: the text; it is escaped.
        size: font size in pixels.
        anchor: which part of the text lies at `x`: "start", "middle" or "end".
        fill: colour.
        weight: "normal" or "bold".
    """
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{fill}">{escape(content)}</text>'
    )


def y_axis(frame: Frame, axis: Axis, label: str) -> list[str]:
    """Return grid lines, their values and the axis label.

    Args:
        frame: page and plotting area.
        axis: vertical, in pixels of the frame.
        label: name and unit of the values.
    """
    left, right = frame.x_range
    parts = []
    for tick in axis.ticks:
        y = axis.px(tick)
        parts += [
            line(left, y, right, y, GRID),
            text(left - 8, y + 4, tick_text(tick, axis.ticks), anchor="end", fill=FAINT),
        ]
    middle = (frame.y_range[0] + frame.y_range[1]) / 2
    turned = text(0, 0, label, anchor="middle", size=13)
    parts.append(f'<g transform="translate(20 {middle:.1f}) rotate(-90)">{turned}</g>')
    return parts


def x_axis(frame: Frame, axis: Axis, label: str) -> list[str]:
    """Return the base line, ticks, their values and the axis label.

    Args:
        frame: page and plotting area.
        axis: horizontal, in pixels of the frame.
        label: name and unit of the values.
    """
    left, right = frame.x_range
    base = frame.y_range[0]
    parts = [line(left, base, right, base, INK)]
    for tick in axis.ticks:
        x = axis.px(tick)
        parts += [
            line(x, base, x, base + 5, INK),
            text(x, base + 19, tick_text(tick, axis.ticks), anchor="middle", fill=FAINT),
        ]
    parts.append(text((left + right) / 2, frame.height - 14, label, anchor="middle", size=13))
    return parts


def legend(frame: Frame, labels: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the legend above the plot.

    Args:
        frame: page and plotting area.
        labels: one for each series.
        keys: SVG elements, one for each label, drawn in a box of 26 by 10 pixels.
    """
    parts, x = [], float(frame.left)
    for label, key in zip(labels, keys, strict=True):
        parts += [f'<g transform="translate({x:.1f} {frame.top - 22})">{key}</g>']
        parts += [text(x + 32, frame.top - 12, label)]
        x += _key_width(label)
    return parts


def page_width(labels: Sequence[str]) -> int:
    """Return the width of a page that holds a legend in one line.

    Args:
        labels: of the legend.
    """
    frame = Frame()
    return max(frame.width, frame.left + math.ceil(sum(map(_key_width, labels))))


def _key_width(label: str) -> float:
    return 32 + 12 * _LETTER * len(label) + 22


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1) -> str:
    """Return a straight line as an SVG element.

    Args:
        x1: pixel of the first end.
        y1: pixel of the first end.
        x2: pixel of the second end.
        y2: pixel of the second end.
        stroke: colour.
        width: in pixels.
    """
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{stroke}" stroke-width="{width:g}"/>'
    )
