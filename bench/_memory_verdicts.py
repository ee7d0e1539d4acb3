"""What a field must show, each judged from the run alone: kept, BROKEN, or UNSURE.

runs      every budget between the planner's minimum and no recomputation trains
peak      measured peak within 1 % of the predicted one
budget    measured peak never above the budget
minimum   our leanest step adds at most 1.02x of what checkpointing every block adds, and at most
          half of the leanest of torch's activation_memory_budget
frontier  no other arm is at once leaner and faster than all of ours
losses    all arms of the field agree

A peer's point is covered when one of ours needs no more memory (0.2 % is taken as the same) and is
not slower: the lower quartile of the paired ratios is at most 1. Else, when it lies between two of
our budgets, the time there is read off the straight line between them (quartiles, too), and the
verdict says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from _fields import BUDGETS, CHECKPOINTS, Field
from _points import FieldResult, Point
from _stats import Quartiles, paired_ratios, summarize

MAX_PEAK_ERROR = 0.01
MAX_OF_CHECKPOINTS = 1.02
MAX_OF_BUDGETS = 0.5
MAX_LOSS_DIFFERENCE = 1e-4
MIN_ROUNDS = 3
"""Paired rounds below which a speed is not judged."""
SAME_PEAK = 1.002


class Cover(NamedTuple):
    """How our points stand to one point of another arm."""

    peer: Point
    state: str
    """"kept", "line", "BROKEN" or "UNSURE"."""
    best: Point | None
    """Ours with no more memory, the fastest of them."""
    ratio: Quartiles | None
    """Of `best` to the peer."""
    on_line: Quartiles | None = None
    """Time on the line between two of ours, relative to the peer."""


def judge_field(result: FieldResult) -> list[str]:
    """Return a line for each promise that this field can judge."""
    lines = [_runs(result), _peak(result), _budget(result), *_minimum(result), *_frontier(result)]
    lines.append(_losses(result))
    return [f"{result.field.name}: {line}" for line in lines if line]


def covers(result: FieldResult) -> list[Cover]:
    """Return for each other point how ours stand to it."""
    return [_cover(result, peer) for peer in result.others]


def _cover(result: FieldResult, peer: Point) -> Cover:
    samples = result.measured.samples
    found: dict[str, Quartiles] = {}
    for point in result.ours:
        ratio = summarize(paired_ratios(samples, point.arm, peer.arm))
        if ratio is not None:
            found[point.arm] = ratio
    timed = [point for point in result.ours if point.arm in found]
    leaner = [point for point in timed if point.peak_bytes <= SAME_PEAK * peer.peak_bytes]
    if not leaner:
        out_of_reach = bool(timed) and all(p.arm in found for p in result.ours)
        return Cover(peer, "BROKEN" if out_of_reach else "UNSURE", None, None)
    best = min(leaner, key=lambda point: found[point.arm].median)
    ratio = found[best.arm]
    if ratio.num < MIN_ROUNDS:
        return Cover(peer, "UNSURE", best, ratio)
    if ratio.low <= 1:
        return Cover(peer, "kept", best, ratio)
    fatter = [point for point in timed if point not in leaner]
    if not fatter:
        return Cover(peer, "BROKEN", best, ratio)
    left, right = leaner[-1], fatter[0]
    share = (peer.peak_bytes - left.peak_bytes) / (right.peak_bytes - left.peak_bytes)
    share = min(1.0, max(0.0, share))
    on_line = _between(found[left.arm], found[right.arm], share)
    return Cover(peer, "line" if on_line.low <= 1 else "BROKEN", best, ratio, on_line)


def _between(left: Quartiles, right: Quartiles, share: float) -> Quartiles:
    low, middle, high = (
        (1 - share) * a + share * b for a, b in zip(left[:3], right[:3], strict=True)
    )
    return Quartiles(low, middle, high, min(left.num, right.num))


def _runs(result: FieldResult) -> str:
    missing = {
        arm: why for arm, why in result.measured.missing.items() if _is_ours(result.field, arm)
    }
    asked = sum(_is_ours(result.field, arm.name) for arm in result.arms)
    text = f"{_mark(not missing)} runs: {len(result.ours)} of {asked} budgets train"
    return text + "".join(f"; {arm}: {why}" for arm, why in missing.items())


def _is_ours(field: Field, arm: str) -> bool:
    return arm.startswith(f"{field.ours.name}-")


def _peak(result: FieldResult) -> str | None:
    errors = {p.label: p.peak_error for p in result.ours if p.peak_error is not None}
    if not errors:
        return None
    worst = max(errors, key=lambda label: abs(errors[label]))
    return (
        f"{_mark(abs(errors[worst]) <= MAX_PEAK_ERROR)} peak: measured within "
        f"{100 * abs(errors[worst]):.2f} % of predicted (at most {100 * MAX_PEAK_ERROR:g} %), "
        f"worst at {worst} ({100 * errors[worst]:+.2f} %)"
    )


def _budget(result: FieldResult) -> str | None:
    margins = {p.label: p.predicted.budget_bytes - p.peak_bytes for p in result.ours if p.predicted}
    if not margins:
        return None
    worst = min(margins, key=margins.__getitem__)
    over = [label for label, margin in margins.items() if margin < 0]
    said = (
        f"above it at {len(over)} of {len(margins)}, most at {worst} by {-margins[worst]:,} bytes"
        if over
        else f"at least {margins[worst]:,} bytes below it"
    )
    return f"{_mark(not over)} budget: measured peak {said}"


def _minimum(result: FieldResult) -> list[str]:
    if not result.ours:
        return []
    least = min(p.peak_bytes - p.live_bytes for p in result.ours)
    lines = []
    for family, most in ((CHECKPOINTS, MAX_OF_CHECKPOINTS), (BUDGETS, MAX_OF_BUDGETS)):
        rivals = [p for p in result.others if p.family == family]
        if not rivals:
            continue
        rival = min(rivals, key=lambda p: p.peak_bytes - p.live_bytes)
        share = least / (rival.peak_bytes - rival.live_bytes)
        lines.append(
            f"{_mark(share <= most)} minimum: our leanest step adds {share:.3f}x of what "
            f"{rival.label} adds (at most {most:g})"
        )
    return lines


def _frontier(result: FieldResult) -> list[str]:
    found = covers(result)
    if not found or not result.ours:
        return []
    states = [cover.state for cover in found]
    mark = "BROKEN" if "BROKEN" in states else "UNSURE" if "UNSURE" in states else "kept  "
    head = (
        f"{mark} frontier: on or below {states.count('kept')} of {len(found)} other points, "
        f"{states.count('line')} more on the line between our budgets"
    )
    return [head, *(f"  {_why(cover)}" for cover in found if cover.state != "kept")]


def _why(cover: Cover) -> str:
    peer, best, ratio = cover.peer, cover.best, cover.ratio
    where = f"{cover.state:<6} {peer.label}:"
    if best is None or ratio is None:
        if cover.state == "UNSURE":
            return f"{where} no paired rounds"
        return f"{where} no point of ours is as lean ({peer.peak_bytes / 2**20:.1f} MiB)"
    text = (
        f"{where} {best.label} takes {_text(ratio)} of its time with "
        f"{best.peak_bytes / peer.peak_bytes:.3f} of its memory, {ratio.num} rounds"
    )
    return text if cover.on_line is None else f"{text}; {_text(cover.on_line)} on the line"


def _text(spread: Quartiles) -> str:
    return f"{spread.median:.3f} [{spread.low:.3f}-{spread.high:.3f}]"


def _losses(result: FieldResult) -> str | None:
    losses = {arm: found for arm, found in result.measured.losses.items() if found}
    if len(losses) < 2:
        return None
    step = min([10, *(len(found) for found in losses.values())])
    difference = max(_spread([found[at - 1] for found in losses.values()]) for at in (1, step))
    return (
        f"{_mark(difference <= MAX_LOSS_DIFFERENCE)} losses: {len(losses)} arms within "
        f"{difference:.1e} of each other at steps 1 and {step}"
    )


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _mark(is_kept: bool) -> str:
    return "kept  " if is_kept else "BROKEN"
