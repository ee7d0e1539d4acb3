"""Which steps count, and what they say: medians, quartiles, ratios paired within a round.

A ratio compares two arms inside the same round only, a few seconds apart, so a machine that slowly
changes its speed moves both sides alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

MAX_WAIT_SHARE = 0.05
MAX_FOREIGN_SHARE = 0.06
MAX_STEAL_SHARE = 0.05
MAX_SPREAD = 1.2
"""Between the speeds of cores in steps that are compared; a busy neighbour makes one 1.5-1.8 times
slower."""


class Quartiles(NamedTuple):
    """Median and quartiles of `num` values."""

    low: float
    median: float
    high: float
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One step of one arm, its ranks taken together."""

    arm: str
    round: int
    wall_s: float
    """Mean over the ranks."""
    slowest_s: float | None = None
    """Of the rank that took longest."""
    wait_share: float
    """Run-queue wait as a share of the step, of the rank that waited most."""
    foreign_share: float
    """Share of the machine that processes outside this arm used."""
    steal_share: float
    """Share of the machine that the hypervisor took."""
    micro_s: float | None = None
    """Of `wall_s`, forward and backward, where the arm measures them."""
    probe_s: float | None = None
    """What a fixed amount of work took before or after the step, at most over the cores."""
    probe_low_s: float | None = None
    """The same, at least."""

    @property
    def had_its_cores(self) -> bool:
        """Whether the step had its cores for itself.

        Ranks may wait for their own communication threads, so waiting alone does not condemn a
        step: other processes must have been busy too.
        """
        waited = self.wait_share > MAX_WAIT_SHARE and self.foreign_share >= MAX_FOREIGN_SHARE
        return not waited and self.steal_share < MAX_STEAL_SHARE


def merge_ranks(
    arm: str, round_index: int, ranks: Sequence[Mapping[str, Any]], num_cores: int
) -> StepSample:
    """Merge the clock differences of one step, one mapping per rank."""
    cpu_s = sum(rank["cpu_s"] for rank in ranks)
    probes = [passed_s for rank in ranks for passed_s in rank.get("probes_s", ())]
    machine_s = [num_cores * rank["wall_s"] for rank in ranks]
    foreign = [
        max(0.0, rank["machine_busy_s"] - cpu_s) / total
        for rank, total in zip(ranks, machine_s, strict=True)
    ]
    steal = [rank["machine_steal_s"] / total for rank, total in zip(ranks, machine_s, strict=True)]
    return StepSample(
        arm=arm,
        round=round_index,
        wall_s=fmean(rank["wall_s"] for rank in ranks),
        slowest_s=max(rank["wall_s"] for rank in ranks),
        wait_share=max(rank["wait_s"] / rank["wall_s"] for rank in ranks),
        foreign_share=fmean(foreign),
        steal_share=fmean(steal),
        micro_s=_mean([rank.get("micro_s") for rank in ranks]),
        probe_s=max(probes, default=None),
        probe_low_s=min(probes, default=None),
    )


def are_clean(samples: Sequence[StepSample]) -> list[bool]:
    """Say of each step whether it counts: it had its cores, and these ran at the common speed.

    The common speed is the one at which the arm with the fewest such steps has most of them, so all
    arms of a pass are given together. It need not be the full one: what matters is that arms are
    compared at equal speed, on all cores.
    """
    common_s = _common_s([each for each in samples if each.had_its_cores and each.probe_s])
    return [
        each.had_its_cores and (each.probe_s is None or _is_at(each, common_s)) for each in samples
    ]


def _common_s(samples: Sequence[StepSample]) -> float:
    """Return what the fixed work takes at the common speed; of several the fastest."""
    arms = {each.arm for each in samples}

    def score(level_s: float) -> tuple[int, int, float]:
        counts = Counter(each.arm for each in samples if _is_at(each, level_s))
        return min(counts[arm] for arm in arms), counts.total(), -level_s

    levels = {_low_s(each) for each in samples}
    return max(levels, key=score, default=0.0)


def _is_at(sample: StepSample, level_s: float) -> bool:
    return level_s <= _low_s(sample) and (sample.probe_s or 0.0) <= MAX_SPREAD * level_s


def _low_s(sample: StepSample) -> float:
    found = sample.probe_s if sample.probe_low_s is None else sample.probe_low_s
    return found or 0.0


def clean(samples: Sequence[StepSample], arm: str) -> list[StepSample]:
    """Return the steps of `arm` that count; `samples` are those of all arms."""
    return [
        sample
        for sample, counts in zip(samples, are_clean(samples), strict=True)
        if counts and sample.arm == arm
    ]


def summarize(values: Sequence[float]) -> Quartiles | None:
    """Return median and quartiles, or None when there is nothing to summarize."""
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0], 1)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(low, middle, high, len(values))


def paired_ratios(
    samples: Sequence[StepSample], arm: str, base: str, *, to_slowest: bool = False
) -> list[float]:
    """Return one ratio of `arm` to `base` for each round in which both have clean steps.

    With `to_slowest` a step of the base takes what its slowest rank takes.
    """
    above = _round_medians(samples, arm)
    below = _round_medians(samples, base, slowest=to_slowest)
    return [above[index] / below[index] for index in sorted(above.keys() & below.keys())]


def fastest(samples: Sequence[StepSample], arms: Sequence[str]) -> str | None:
    """Return the arm with the lowest median step among `arms`, or None when none has steps."""
    medians = {
        arm: median(sample.wall_s for sample in steps)
        for arm in arms
        if (steps := clean(samples, arm))
    }
    return min(medians, key=medians.__getitem__, default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _round_medians(
    samples: Sequence[StepSample], arm: str, *, slowest: bool = False
) -> dict[int, float]:
    rounds: dict[int, list[float]] = {}
    for sample in clean(samples, arm):
        wall_s = sample.slowest_s if slowest and sample.slowest_s else sample.wall_s
        rounds.setdefault(sample.round, []).append(wall_s)
    return {index: median(walls) for index, walls in rounds.items()}
