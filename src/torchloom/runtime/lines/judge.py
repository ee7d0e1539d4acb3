"""Whether a run can go on, from what its ranks report: a function of data alone.

    a rank waits for one that has ended             it never comes
    ranks wait for each other, each for something
    that the other has not begun                    they run different programs
    all ranks stand in collectives                  likewise, where torch's own are among them
    a rank waits longer than its limit              the other one is late

A rank that computes, compiles or loads data is waited for: it may still come.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.position import Verdict
from torchloom.runtime.lines.report import Report, Waiting

_ADVICE = (
    "The ranks run different programs: look for a branch that only some of them take, a call "
    "that only some make (an evaluation, state_dict(), save_checkpoint()), an error that one "
    "of them caught, or parameters that only some use (experts, conditional heads), which every rank must run in "
    "the same order, with 0 * output added to the loss where a rank does not need them"
)
_ALONE = (
    "Look for a call that only some make (an evaluation, generate(), state_dict(), a save): ranks gather together, so let every "
    "rank make it, and one rank alone print or write what it returns"
)
_UPDATES = (
    "Look for an optimizer.step() that only some ranks call, or that a scaler leaves out on some"
)
_LOADS = "Call load_state_dict on all ranks, with the same weights"
_BACKWARDS = (
    "Look for a micro-step that only some ranks take: the mean over ranks would be of unlike sums"
)
_RATES = (
    "A schedule or a change of the optimizer's groups must see the same on every rank: average what it "
    "looks at over the ranks first (a loss, for ReduceLROnPlateau)"
)
_SHOWN = 8
"""Ranks whose positions a sentence lists."""


def judge(reports: Mapping[int, Report], gone: Mapping[int, str]) -> Verdict | None:
    """Return why the run cannot go on, None where it may.

    Args:
        reports: the latest report of each rank that runs, by global rank.
        gone: of ranks that have ended, how, e.g. "was killed".
    """
    found = lost(reports, gone)
    if found is not None:
        return found
    blocked = {rank: _missing(each, reports) for rank, each in reports.items()}
    parted = _parted(reports)
    if parted is not None:
        return parted
    cycle = _cycle(blocked)
    if cycle:
        return Verdict("differ", f"{_positions(cycle, reports)}. {_advice(reports)}")
    if len(reports) > 1 and all(each.waiting or each.blocked_in for each in reports.values()):
        ours = [rank for rank, missing in blocked.items() if missing]
        if ours:
            positions = _positions(sorted(reports), reports)
            return Verdict("differ", f"{positions}. {_advice(reports)}")
    return _late(reports, blocked)


def lost(reports: Mapping[int, Report], gone: Mapping[int, str]) -> Verdict | None:
    """Return the verdict where a rank waits for one that has ended."""
    for rank, each in sorted(reports.items()):
        waiting = each.waiting
        ended = [] if waiting is None else [other for other in waiting.ranks if other in gone]
        if waiting is not None and ended:
            return Verdict(
                "lost",
                f"rank {ended[0]} {gone[ended[0]]}; rank {rank} waits for it at {waiting.what}. "
                f"Look at the output of rank {ended[0]} for the cause",
            )
    return None


def _missing(each: Report, reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that have not begun what a rank waits for."""
    waiting = each.waiting
    if waiting is None:
        return []
    others = [reports[rank] for rank in waiting.ranks if rank != each.rank and rank in reports]
    return [other.rank for other in others if other.begun.get(waiting.event) is False]


def _cycle(blocked: Mapping[int, list[int]]) -> list[int]:
    """Return ranks each of which waits for the next, and the last for the first; or none."""
    for start in sorted(blocked):
        path = [start]
        seen = {start}
        while True:
            onward = [rank for rank in blocked.get(path[-1], []) if blocked.get(rank)]
            if start in onward:
                return path
            fresh = [rank for rank in onward if rank not in seen]
            if not fresh:
                break
            seen.add(fresh[0])
            path.append(fresh[0])
    return []


def _parted(reports: Mapping[int, Report]) -> Verdict | None:
    """Return where the order of two ranks parts in a group whose messages carry no names."""
    for first in sorted(reports):
        for other in sorted(rank for rank in reports if rank > first):
            for name, rows in reports[first].order.items():
                theirs = {place: row for place, *row in reports[other].order.get(name, [])}
                for place, key, what in rows:
                    if place in theirs and theirs[place][0] != key:
                        return Verdict(
                            "differ",
                            f"rank {first} began {what}, where rank {other} began "
                            f"{theirs[place][1]}. {_advice(reports)}",
                        )
    return None


def _late(reports: Mapping[int, Report], blocked: Mapping[int, list[int]]) -> Verdict | None:
    for rank, missing in sorted(blocked.items()):
        waiting = reports[rank].waiting
        for late in missing:
            if waiting is None or late not in reports:
                continue
            limit_s, key = _limit(reports[rank], reports[late], waiting)
            if waiting.for_s > limit_s:
                return Verdict(
                    "late",
                    f"rank {late} did not come within {limit_s:g} s to what rank {rank} waits for "
                    f"({waiting.what}): it {reports[late].text()}. Look at its output, or raise "
                    f"{key}",
                )
    return None


def _limit(waits: Report, late: Report, waiting: Waiting) -> tuple[float, str]:
    limits = waits.limits
    if late.phase:
        return limits.compile_s, "timeouts.compile_s"
    if waiting.is_agreement:
        return limits.agree_s, "timeouts.agree_s"
    return limits.step_s, "timeouts.step_s"


def _advice(reports: Mapping[int, Report]) -> str:
    """Return why ranks may have come to different things."""
    for first, each in sorted(reports.items()):
        for other, that in sorted(reports.items()):
            if each.step == that.step and each.updates != that.updates:
                return (
                    f"Their optimizers have stepped {each.updates} times on rank {first}, "
                    f"{that.updates} times on rank {other}. {_UPDATES}"
                )
            if each.loads != that.loads:
                more, less = (first, other) if each.loads > that.loads else (other, first)
                return f"Rank {more} has loaded weights that rank {less} has not. {_LOADS}"
            if each.purpose != that.purpose:
                alone, less = (first, other) if each.purpose else (other, first)
                purpose = reports[alone].purpose
                return f"Rank {alone} gathers {purpose}, rank {less} does not. {_ALONE}"
            if each.step == that.step and each.backwards != that.backwards:
                return (
                    f"Their engines have run {each.backwards} backward passes on rank {first}, "
                    f"{that.backwards} on rank {other}. {_BACKWARDS}"
                )
            if each.step == that.step and each.rates != that.rates:
                return (
                    f"Their optimizers step with different numbers: rank {first} with {each.rates or None}; "
                    f"rank {other} with {that.rates or None}. {_RATES}"
                )
    return _ADVICE


def _positions(ranks: list[int], reports: Mapping[int, Report]) -> str:
    shown = [f"rank {rank} {reports[rank].text()}" for rank in ranks[:_SHOWN]]
    more = len(ranks) - _SHOWN
    return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)
