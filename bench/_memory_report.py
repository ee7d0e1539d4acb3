"""Fields as text, as one JSON record and as charts of step time over peak memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _memory_verdicts import covers
from _points import FieldResult, Point, pareto
from _stats import Quartiles, are_clean

_MIB = 1 << 20


def table(result: FieldResult, min_clean: int) -> str:
    """Return a field as a text table, our points first; what could not run gives its reason."""
    head = (
        f"{result.field.title:<42}{'budget':>8}{'peak':>8}{'predicted':>11}{'error':>8}"
        f"{'ratio to base':>22}{'step s':>9}{'fwd+bwd':>9}{'predicted':>11}{'meas/pred':>11}"
        f"{'clean':>7}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(p, min_clean) for p in (*reversed(result.ours), *result.others)]
    labels = {arm.name: arm.label for arm in result.arms}
    lines += [f"{labels[arm]:<42}  not run: {why}" for arm, why in result.measured.missing.items()]
    base = labels.get(result.field.base, "not among these")
    lines.append(
        f"peaks in MiB, of the rank that held most, all it holds included; base = {base}; ratio: "
        f"median [quartiles] over rounds; * fewer than {min_clean} clean steps"
    )
    lines.append(
        "predicted times are of forward and backward by the planner's cost table; seconds a step"
    )
    return "\n".join(lines)


def _line(point: Point, min_clean: int) -> str:
    star = "*" if point.num_clean < min_clean else " "
    plan = point.predicted
    cells = (
        (8, _mib(plan and plan.budget_bytes)),
        (8, _mib(point.peak_bytes)),
        (11, _mib(plan and plan.peak_bytes)),
        (8, "" if point.peak_error is None else f"{100 * point.peak_error:+.2f}%"),
        (22, _spread(point.ratio) + star),
        (9, _seconds(point.step_s)),
        (9, _seconds(point.micro_s) if plan else ""),
        (11, f"{plan.micro_s:.3f}" if plan else ""),
        (11, "" if point.micro_ratio is None else f"{point.micro_ratio:.2f}"),
        (7, str(point.num_clean)),
    )
    return f"{point.label:<42}" + "".join(f"{text:>{width}}" for width, text in cells)


def write_json(
    environment: Mapping[str, Any],
    results: Sequence[FieldResult],
    verdicts: Sequence[str],
    path: Path,
) -> None:
    """Write the whole run: environment, points with predictions, every sample, verdicts."""
    record = {
        "environment": dict(environment),
        "fields": [_field_record(result) for result in results],
        "verdicts": list(verdicts),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _field_record(result: FieldResult) -> dict[str, Any]:
    measured = result.measured
    return {
        "name": result.field.name,
        "title": result.field.title,
        "world_size": result.field.world_size,
        "batch": measured.batch,
        "base": result.field.base,
        "points": [_point_record(point) for point in result.points],
        "covers": [
            {
                "peer": cover.peer.arm,
                "state": cover.state,
                "ours": cover.best.arm if cover.best else None,
                "ratio": cover.ratio._asdict() if cover.ratio else None,
                "on_line": cover.on_line._asdict() if cover.on_line else None,
            }
            for cover in covers(result)
        ],
        "plans": {arm: dict(facts.said) for arm, facts in measured.facts.items() if facts.said},
        "missing": measured.missing,
        "losses": measured.losses,
        "samples": [
            {**asdict(sample), "is_clean": counts}
            for sample, counts in zip(measured.samples, are_clean(measured.samples), strict=True)
        ],
    }


def _point_record(point: Point) -> dict[str, Any]:
    record = {**asdict(point), "peak_error": point.peak_error, "micro_ratio": point.micro_ratio}
    for key in ("step_s", "ratio", "micro_s"):
        spread = getattr(point, key)
        record[key] = spread._asdict() if spread else None
    return record


def write_chart(result: FieldResult, path: Path) -> str | None:
    """Draw a field: each family's points, and the line through those that none of it beats."""
    try:
        from torchloom.report.charts import Series, line_chart
    except ImportError as error:
        return f"no chart: {error}"
    families: dict[str, list[tuple[float, float]]] = {}
    for point in (*result.ours, *result.others):
        if point.ratio is not None:
            place = (point.peak_bytes / _MIB, point.ratio.median)
            is_free = point.is_ours and point.predicted is None
            family = f"{point.family}, no budget" if is_free else point.family
            families.setdefault(family, []).append(place)
    if not families:
        return f"no chart of {result.field.name}: no point has a ratio"
    base = next((arm.label for arm in result.arms if arm.name == result.field.base), "")
    series = []
    for family, places in families.items():
        best = pareto(places)
        beaten = tuple(place for place in places if place not in best)
        xs, ys = zip(*best, strict=True)
        series.append(Series(family, xs, ys, has_markers=True, beside=beaten))
    path.write_text(
        line_chart(
            series,
            title=f"Step time over peak memory: {result.field.title}",
            x_label="highest memory of a step, MiB per process",
            y_label="step time, ratio",
            note=f"Ratio to {base}; medians paired within rounds. Hollow: its own family beats it.",
        )
    )
    return None


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / _MIB:.1f}"


def _seconds(spread: Quartiles | None) -> str:
    return f"{spread.median:.3f}" if spread else "-"


def _spread(spread: Quartiles | None) -> str:
    return f"{spread.median:.3f} [{spread.low:.3f}-{spread.high:.3f}]" if spread else "-"
