"""Whether a run can go on, from what its ranks report: a function of data alone.

    a rank waits for one that has ended             it never comes
    ranks wait for each other, each for something
    that the other has not begun                    they run different programs
    all ranks stand in collectives                  likewise, where torch's own are among them
    a rank waits longer than its limit              the other one is late

A rank that computes, compiles or loads data is waited for: it may still come.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torchloom.position import Verdict
from torchloom.runtime.lines.report import Report, limit_of

_ADVICE = (
    "The ranks run different programs: look for a branch that only some of them take, a call "
    "that only some make (an evaluation, state_dict(), save_checkpoint()), an error that one "
    "of them caught, or parameters that only some use (experts, heads of tasks), whose module every rank must call and "
    "the program must mark before the model is sharded: torchloom.leaf(module)"
)
_CAUSES = (
    (
        "updates",
        "Their optimizers have stepped {x} times on rank {first}, {y} times on rank {other}. "
        "Look for an optimizer.step() that only some ranks call, or that a scaler leaves out on some",
    ),
    (
        "loads",
        "Rank {first} has loaded weights that rank {other} has not. "
        "Call load_state_dict on all ranks, with the same weights",
    ),
    (
        "purpose",
        "Rank {first} gathers {x}, rank {other} does not. Look for a call that only some make (an evaluation, "
        "generate(), state_dict(), a save): ranks gather together, so let every "
        "rank make it, and one rank alone print or write what it returns",
    ),
    (
        "backwards",
        "Their engines have run {x} backward passes on rank {first}, {y} on rank {other}. "
        "Look for a micro-step that only some ranks take: the mean over ranks would be of unlike sums",
    ),
    (
        "rates",
        "Their optimizers step with different numbers: rank {first} with {x}; rank {other} with {y}. "
        "A schedule or a change of the optimizer's groups must see the same on every rank: average what it "
        "looks at over the ranks first (a loss, for ReduceLROnPlateau)",
    ),
)
"""Fields of reports in which ranks may differ that run different programs, and what is told then."""
_AT_ANY_STEP = ("loads", "purpose")
"""Fields that are compared between ranks in different steps, too."""
_SHOWN = 8
"""Ranks whose positions a sentence lists."""


def judge(reports: Mapping[int, Report], gone: Mapping[int, str]) -> Verdict | None:
    """Return why the run cannot go on, None where it may.

    Args:
        reports: the latest report of each rank that runs, by global rank.
        gone: of ranks that have ended, how, e.g. "was killed".
    """
    found = _lost(reports, gone) or _parted(reports)
    if found is not None:
        return found
    blocked = {rank: _missing(each, reports) for rank, each in reports.items()}
    stuck = _stuck(blocked)
    all_stand = all(each.waiting or each.blocked_in for each in reports.values())
    if not stuck and all_stand and any(blocked.values()):
        stuck = sorted(reports)
    if stuck:
        return Verdict("differ", f"{_positions(stuck, reports)}. {_advice(reports)}")
    return _late(reports, blocked)


def _lost(reports: Mapping[int, Report], gone: Mapping[int, str]) -> Verdict | None:
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


def _stuck(blocked: Mapping[int, list[int]]) -> list[int]:
    """Return ranks that wait for each other, or for ranks that do; none where each may still be let go on."""
    found = {rank for rank, missing in blocked.items() if missing}
    while going := {rank for rank in found if not found.intersection(blocked[rank])}:
        found -= going
    return sorted(found)


def _parted(reports: Mapping[int, Report]) -> Verdict | None:
    """Return where the order of two ranks parts in a group whose messages carry no names."""
    for one, other in itertools.combinations(sorted(reports), 2):
        for name, rows in reports[one].order.items():
            theirs = {place: row for place, *row in reports[other].order.get(name, [])}
            for place, key, what in rows:
                if place in theirs and theirs[place][0] != key:
                    return Verdict(
                        "differ",
                        f"rank {one} began {what}, where rank {other} began {theirs[place][1]}. "
                        f"{_advice(reports)}",
                    )
    return None


def _late(reports: Mapping[int, Report], blocked: Mapping[int, list[int]]) -> Verdict | None:
    for rank, missing in sorted(blocked.items()):
        waiting = reports[rank].waiting
        for late in missing:
            assert waiting is not None
            limits, phase = reports[rank].limits, reports[late].phase
            limit_s, key = limit_of(limits, waiting.is_agreement, phase)
            if waiting.for_s > limit_s:
                return Verdict(
                    "late",
                    f"rank {late} did not come within {limit_s:g} s to what rank {rank} waits for "
                    f"({waiting.what}): it {reports[late].text()}. Look at its output, or raise "
                    f"{key}",
                )
    return None


def _advice(reports: Mapping[int, Report]) -> str:
    """Return why ranks may have come to different things."""
    for pair in itertools.combinations(sorted(reports), 2):
        for field, words in _CAUSES:
            value = {rank: getattr(reports[rank], field) for rank in pair}
            is_same_step = reports[pair[0]].step == reports[pair[1]].step
            if len(set(value.values())) > 1 and (is_same_step or field in _AT_ANY_STEP):
                first, other = pair
                if field in _AT_ANY_STEP and not value[first] > value[other]:  # who did more
                    first, other = other, first
                x, y = (None if value[rank] == "" else value[rank] for rank in (first, other))
                return words.format(first=first, other=other, x=x, y=y)
    return _ADVICE


def _positions(ranks: list[int], reports: Mapping[int, Report]) -> str:
    shown = [f"rank {rank} {reports[rank].text()}" for rank in ranks[:_SHOWN]]
    more = len(ranks) - _SHOWN
    return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)
