"""Results as text, as one JSON record and as charts; the chart library is torchloom's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _compile_times import FirstStep
from _rounds import PassResult
from _stats import Quartiles, are_clean, clean, fastest, paired_ratios, summarize
from arms import ARMS

_LIMITS = ("limit-eager", "limit-compiled")
_VARIANTS = ("eager", "compiled", "compiled per block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm at one batch size; what was not measured is None."""

    arm: str
    step_s: Quartiles | None
    ratio: Quartiles | None
    """To the limit, paired within rounds."""
    num_clean: int
    num_discarded: int
    live_mib: float | None = None
    peak_mib: float | None = None
    """Above `live_mib`."""
    shared_mib: float | None = None
    first_step_s: float | None = None
    loss: float | None = None
    note: str = ""

    @property
    def total_mib(self) -> float | None:
        """Highest point of a step: live, shared and step peak together."""
        if self.live_mib is None or self.peak_mib is None:
            return None
        return self.live_mib + self.peak_mib + (self.shared_mib or 0.0)


@dataclass(kw_only=True, slots=True)
class Report:
    """A whole run."""

    environment: Mapping[str, Any]
    passes: list[PassResult] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)


def limit_of(result: PassResult) -> str | None:
    """Return the arm that is the limit of this pass: the faster of eager and compiled."""
    return fastest(result.samples, _LIMITS)


def rows(result: PassResult, arms: Sequence[str], loss_step: int) -> list[Row]:
    """Return one row for each arm, in the order of `arms`."""
    return [_row(result, arm, limit_of(result), loss_step) for arm in arms]


def common_step(result: PassResult, wanted: int = 10) -> int:
    """Return the step, counted from 1, whose losses are compared: `wanted`, or the last common."""
    return min([wanted, *(len(losses) for losses in result.losses.values())])


def _row(result: PassResult, arm: str, base: str | None, loss_step: int) -> Row:
    if arm in result.missing:
        return Row(
            arm=arm, step_s=None, ratio=None, num_clean=0, num_discarded=0, note=result.missing[arm]
        )
    facts, good = result.facts[arm], clean(result.samples, arm)
    taken = sum(sample.arm == arm for sample in result.samples)
    return Row(
        arm=arm,
        step_s=summarize([sample.wall_s for sample in good]),
        ratio=summarize(paired_ratios(result.samples, arm, base)) if base else None,
        num_clean=len(good),
        num_discarded=taken - len(good),
        live_mib=facts.live_bytes / 2**20,
        peak_mib=facts.peak_bytes / 2**20,
        shared_mib=facts.shared_bytes / 2**20,
        first_step_s=facts.first_step_s,
        loss=result.losses[arm][loss_step - 1],
    )


def table(result: PassResult, arms: Sequence[str], min_clean: int) -> str:
    """Return the pass as a text table; arms with too few clean steps are starred."""
    loss_step = common_step(result)
    head = (
        f"{'batch ' + str(result.batch):<28}{'ratio to limit':>22}{'step s':>9}{'clean':>7}"
        f"{'disc.':>7}{'live':>7}{'+ shm':>7}{'+ peak':>8}{'= MiB':>7}{f'loss@{loss_step}':>11}"
    )
    lines = [head, "-" * len(head)]
    for row in rows(result, arms, loss_step):
        label = ARMS[row.arm].label
        if row.note:
            lines.append(f"{label:<28}  not run: {row.note}")
            continue
        star = "*" if row.num_clean < min_clean else " "
        step = f"{row.step_s.median:.3f}" if row.step_s else "-"
        lines.append(
            f"{label:<28}{_spread(row.ratio):>21}{star}{step:>9}{row.num_clean:>7}"
            f"{row.num_discarded:>7}{row.live_mib:>7.0f}{row.shared_mib:>7.0f}{row.peak_mib:>8.0f}"
            f"{row.total_mib:>7.0f}{row.loss:>11.5f}"
        )
    limit = limit_of(result)
    lines.append(f"limit = {ARMS[limit].label}; " if limit else "no clean step of the limit; ")
    lines[-1] += f"ratio: median [quartiles] over rounds; * fewer than {min_clean} clean steps"
    return "\n".join(lines)


def write_json(report: Report, path: Path) -> None:
    """Write the whole run: environment, every sample with its verdict, first steps, rows."""
    record = {
        "environment": dict(report.environment),
        "passes": [_pass_record(result) for result in report.passes],
        "first_steps": [asdict(step) for step in report.first_steps],
        "verdicts": report.verdicts,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _pass_record(result: PassResult) -> dict[str, Any]:
    arms = [*result.facts, *(arm for arm in result.missing if arm not in result.facts)]
    loss_step = common_step(result)
    return {
        "batch": result.batch,
        "limit": limit_of(result),
        "loss_step": loss_step,
        "rows": [_row_record(row) for row in rows(result, arms, loss_step)],
        "losses": result.losses,
        "samples": [
            {**asdict(sample), "is_clean": counts}
            for sample, counts in zip(result.samples, are_clean(result.samples), strict=True)
        ],
    }


def _row_record(row: Row) -> dict[str, Any]:
    record = {**asdict(row), "total_mib": row.total_mib}
    for key in ("step_s", "ratio"):
        spread = getattr(row, key)
        record[key] = spread._asdict() if spread else None
    return record


def write_chart(result: PassResult, arms: Sequence[str], path: Path) -> str | None:
    """Draw the ratios of one pass; return why not when nothing can be drawn."""
    try:
        from torchloom.report.charts import Bar, BarGroup, bar_chart
    except ImportError as error:
        return f"no chart: {error}"
    found = {row.arm: row.ratio for row in rows(result, arms, common_step(result)) if row.ratio}
    if not found:
        return "no chart: no arm has a ratio"
    families = list(dict.fromkeys(ARMS[arm].family for arm in found))
    bars = {
        (ARMS[arm].variant, ARMS[arm].family): Bar(ratio.median, ratio.low, ratio.high)
        for arm, ratio in found.items()
    }
    variants = [name for name in _VARIANTS if any(variant == name for variant, _ in bars)]
    svg = bar_chart(
        families,
        [BarGroup(name, [bars.get((name, family)) for family in families]) for name in variants],
        title=f"Step time beside the limit, batch {result.batch} per rank",
        y_label="ratio to two replicas that never talk",
        note="Median of ratios paired within rounds; error bars are quartiles. Lower is better.",
    )
    path.write_text(svg)
    return None


def _spread(spread: Quartiles | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.3f} [{spread.low:.3f}-{spread.high:.3f}]"
