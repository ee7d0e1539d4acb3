"""The promises that a run must show, each judged from the run alone: kept, BROKEN, or UNSURE.

speed     stage 3 is faster than the fastest FSDP2, in the same rounds
limit     stage 3 in shared memory takes hardly longer than replicas that never talk
memory    stage 3 peaks no higher than the leanest compiled FSDP2
compile   stage 3 compiles in at most 1.3x the time of plain torch.compile, cold and warm
losses    arms that exchange gradients agree; the first step agrees for all
selective where room keeps weights gathered, a step gathers less and takes less time
"""

from __future__ import annotations

from collections.abc import Sequence

from _compile_times import FirstStep, compile_ratios
from _report import common_step, limit_of, rows
from _rounds import PassResult
from _stats import fastest, paired_ratios, summarize
from arms import ARMS

OURS = "loom-3"
SELECTIVE = "loom-3-selective"
PLAIN = "limit-compiled"
MAX_COMPILE_RATIO = 1.3
SHARED = "loom-3-shared"
MAX_SHARED_RATIOS = {4: 1.02, 1: 1.10}
"""To the limit, by sequences per rank: the fewer, the more communication weighs."""
MAX_LOSS_DIFFERENCE = 1e-4
MIN_ROUNDS = 3
"""Paired rounds below which a speed is not judged."""

_FSDP2 = ("fsdp2-eager", "fsdp2-block", "fsdp2-whole")
_FSDP2_COMPILED = _FSDP2[1:]


def judge_pass(result: PassResult) -> list[str]:
    """Return a line for each promise that this pass can judge."""
    lines = [_speed(result), _limit(result), _memory(result), _selective(result), *_losses(result)]
    return [f"batch {result.batch}: {line}" for line in lines if line]


def judge_compile(steps: Sequence[FirstStep]) -> list[str]:
    """Return a line for the cold and the warm compile."""
    lines = []
    for cache in ("cold", "warm"):
        ratio = summarize(compile_ratios(steps, OURS, PLAIN, cache))
        if ratio:
            lines.append(
                f"{_mark(ratio.median <= MAX_COMPILE_RATIO)} compile {cache}: stage 3 takes "
                f"{ratio.median:.2f}x [{ratio.low:.2f}-{ratio.high:.2f}] of plain torch.compile, "
                f"{ratio.num} repeats (at most {MAX_COMPILE_RATIO})"
            )
    return lines


def _speed(result: PassResult) -> str | None:
    rival = fastest(result.samples, _FSDP2)
    ratio = summarize(paired_ratios(result.samples, OURS, rival)) if rival else None
    if ratio is None:
        return None
    mark = _mark(ratio.high < 1) if ratio.num >= MIN_ROUNDS else "UNSURE"
    return (
        f"{mark} speed: stage 3 takes {ratio.median:.3f} "
        f"[{ratio.low:.3f}-{ratio.high:.3f}] of {ARMS[rival].label}, {ratio.num} rounds"
    )


def _limit(result: PassResult) -> str | None:
    limit, allowed = limit_of(result), MAX_SHARED_RATIOS.get(result.batch)
    if limit is None or allowed is None:
        return None
    # Whoever exchanges gradients waits for the slower rank; cores of one machine differ by the second.
    ratio = summarize(paired_ratios(result.samples, SHARED, limit, to_slowest=True))
    if ratio is None:
        return None
    mark = _mark(ratio.median <= allowed) if ratio.num >= MIN_ROUNDS else "UNSURE"
    return (
        f"{mark} limit: stage 3 in shared memory takes {ratio.median:.3f} "
        f"[{ratio.low:.3f}-{ratio.high:.3f}] of the slower replica of {ARMS[limit].label}, "
        f"{ratio.num} rounds (at most {allowed})"
    )


def _memory(result: PassResult) -> str | None:
    names = [arm for arm in (OURS, *_FSDP2_COMPILED) if arm in result.facts]
    totals = {row.arm: row.total_mib for row in rows(result, names, 1) if row.total_mib}
    if OURS not in totals or len(totals) < 2:
        return None
    ours = totals.pop(OURS)
    rival = min(totals, key=totals.__getitem__)
    return (
        f"{_mark(ours <= totals[rival])} memory: stage 3 peaks at {ours:.0f} MiB, "
        f"{ARMS[rival].label} at {totals[rival]:.0f} MiB"
    )


def _selective(result: PassResult) -> str | None:
    ratio = summarize(paired_ratios(result.samples, SELECTIVE, OURS))
    if ratio is None:
        return None
    many, few = (result.facts[arm].said["num_gathers"] for arm in (OURS, SELECTIVE))
    mark = _mark(ratio.high < 1 and few < many) if ratio.num >= MIN_ROUNDS else "UNSURE"
    return (
        f"{mark} selective: gathers in a step fall from {many} to {few}, its time to "
        f"{ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}], {ratio.num} rounds"
    )


def _losses(result: PassResult) -> list[str]:
    step = common_step(result)
    talking = [arm for arm in result.losses if ARMS[arm].communicates]
    lines = []
    for arms, at in ((list(result.losses), 1), (talking, step)):
        if len(arms) < 2:
            continue
        values = [result.losses[arm][at - 1] for arm in arms]
        difference = max(values) - min(values)
        lines.append(
            f"{_mark(difference <= MAX_LOSS_DIFFERENCE)} losses: {len(arms)} arms within "
            f"{difference:.1e} of each other at step {at}"
        )
    return lines


def _mark(is_kept: bool) -> str:
    return "kept  " if is_kept else "BROKEN"
