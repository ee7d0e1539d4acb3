"""Axes: where round tick values fall and how they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values laid over a range of pixels."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def px(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)


def linear_axis(
    low: float, high: float, start_px: float, end_px: float, *, num_ticks: int = 6
) -> Axis:
    """Return an axis whose ends are round values that enclose `low` and `high`.

    Args:
        low: smallest value to show.
        high: largest value to show; an axis of one value is widened around it.
        start_px: pixel of the low end.
        end_px: pixel of the high end.
        num_ticks: about how many ticks.
    """
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], start_px, end_px, ticks)


def tight_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """Return an axis that ends at `low` and `high`, with round ticks between them.

    Args:
        low: value at the low end.
        high: value at the high end; if it is no larger than `low`, the axis spans 1.
        start_px: pixel of the low end.
        end_px: pixel of the high end.
    """
    if high <= low:
        high = low + 1
    loose = linear_axis(low, high, start_px, end_px, num_ticks=8)
    slack = 1e-9 * (high - low)
    ticks = tuple(t for t in loose.ticks if low - slack <= t <= high + slack)
    return Axis(low, high, start_px, end_px, ticks)


def log_axis(low: float, high: float, start_px: float, end_px: float) -> Axis:
    """Return a logarithmic axis with ticks at 1, 2 and 5 times powers of ten.

    Args:
        low: smallest value to show, above 0.
        high: largest value to show.
        start_px: pixel of the low end.
        end_px: pixel of the high end.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    bottom = max(m for m in marks if m <= low)
    top = min((m for m in marks if m > low and m >= high), default=high)
    ticks = [m for m in marks if bottom <= m <= top]
    if len(ticks) > 9:
        ticks = [t for t in ticks if _is_power_of_ten(t) or t in (bottom, top)]
    return Axis(bottom, top, start_px, end_px, tuple(ticks), is_log=True)


def tick_text(value: float, ticks: tuple[float, ...]) -> str:
    """Return a tick's label; from ten thousand on the axis counts in k, M, G or T."""
    largest = max(abs(t) for t in ticks)
    for size, suffix in _SUFFIXES:
        if largest >= max(size, 1e4) and abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.6g}" if abs(value) > 1e-12 * largest else "0"


def value_text(value: float) -> str:
    """Return a value with three significant digits and no exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def _is_power_of_ten(value: float) -> bool:
    exponent = math.log10(value)
    return abs(exponent - round(exponent)) < 1e-9
