"""Points of the trade between memory and time: what each arm took, and what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _fields import OURS, Field
from _rounds import PassResult
from _stats import Quartiles, clean, paired_ratios, summarize
from arms import Arm


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the plan of a point said."""

    budget_bytes: int
    peak_bytes: int
    micro_s: float
    """Forward and backward; communication and optimizer are not in it."""
    compute_s: float
    """The same without recomputation."""
    num_recomputed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One arm of a field; sizes are of the rank that held most."""

    arm: str
    family: str
    label: str
    peak_bytes: int
    """Highest point of a step: parameters, states and shared memory included."""
    live_bytes: int
    """Of these, what lives between steps."""
    step_s: Quartiles | None
    ratio: Quartiles | None
    """To the field's base, paired within rounds."""
    micro_s: Quartiles | None = None
    num_clean: int = 0
    predicted: Prediction | None = None

    @property
    def is_ours(self) -> bool:
        return self.family == OURS

    @property
    def peak_error(self) -> float | None:
        """Measured less predicted peak, as a part of the predicted one."""
        if self.predicted is None:
            return None
        return self.peak_bytes / self.predicted.peak_bytes - 1

    @property
    def micro_ratio(self) -> float | None:
        """Measured to predicted time of forward and backward."""
        if self.predicted is None or self.micro_s is None or not self.predicted.micro_s:
            return None
        return self.micro_s.median / self.predicted.micro_s


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldResult:
    """One field as it was measured."""

    field: Field
    arms: tuple[Arm, ...]
    measured: PassResult
    points: tuple[Point, ...]

    @property
    def ours(self) -> list[Point]:
        """Our points, the leanest first."""
        return sorted((p for p in self.points if p.is_ours), key=lambda p: p.peak_bytes)

    @property
    def others(self) -> list[Point]:
        return [point for point in self.points if not point.is_ours]


def field_result(field: Field, arms: Sequence[Arm], measured: PassResult) -> FieldResult:
    """Make points of what a pass measured; arms that could not run have none."""
    ran = [arm for arm in arms if arm.name in measured.facts and arm.name not in measured.missing]
    points = tuple(_point(field, arm, measured) for arm in ran)
    return FieldResult(field=field, arms=tuple(arms), measured=measured, points=points)


def _point(field: Field, arm: Arm, measured: PassResult) -> Point:
    facts, good = measured.facts[arm.name], clean(measured.samples, arm.name)
    return Point(
        arm=arm.name,
        family=arm.family,
        label=arm.label,
        peak_bytes=facts.live_bytes + facts.peak_bytes + facts.shared_bytes,
        live_bytes=facts.live_bytes + facts.shared_bytes,
        step_s=summarize([sample.wall_s for sample in good]),
        ratio=summarize(paired_ratios(measured.samples, arm.name, field.base)),
        micro_s=summarize([s.micro_s for s in good if s.micro_s is not None]),
        num_clean=len(good),
        predicted=_prediction(facts.said) if "budget_bytes" in facts.said else None,
    )


def _prediction(said: Any) -> Prediction:
    return Prediction(
        budget_bytes=said["budget_bytes"],
        peak_bytes=said["peak_bytes"],
        micro_s=said["micro_s"],
        compute_s=said["compute_s"],
        num_recomputed=said["num_recomputed"],
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (memory, time) pairs that no other one beats in both, the leanest first."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
