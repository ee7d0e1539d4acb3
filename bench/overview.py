"""Draw the chart of the README from committed results: step time and peak memory beside FSDP2 and DeepSpeed.

    python bench/overview.py                    docs/_static/overview.svg

Reads `bench/results/train-2rank-gloo-cpu.json`, which `make bench` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _stats import StepSample, paired_ratios, summarize
from torchloom.report.charts import Bar, BarGroup, bar_chart

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "bench" / "results" / "train-2rank-gloo-cpu.json"
_CHART = _ROOT / "docs" / "_static" / "overview.svg"
_BASE = "fsdp2-whole"
_ARMS = {
    "loom-3-shared": "torchloom, shared memory",
    "loom-3": "torchloom",
    _BASE: "FSDP2",
    "deepspeed-compiled": "DeepSpeed ZeRO-3",
}


def overview(record: dict[str, Any]) -> str:
    """Return the chart: medians of ratios within a round with quartiles, and peaks of a step.

    Args:
        record: of `bench/train.py`.
    """
    passes = {each["batch"]: each for each in record["passes"]}
    groups = [
        BarGroup(f"step time, batch {batch}", _times(passes[batch]["samples"])) for batch in (1, 4)
    ]
    peaks = {row["arm"]: row["total_mib"] for row in passes[4]["rows"]}
    memory = [Bar(peaks[arm] / peaks[_BASE]) for arm in _ARMS]
    return bar_chart(
        list(_ARMS.values()),
        [*groups, BarGroup("peak memory, batch 4", memory)],
        title="A training step beside FSDP2 and DeepSpeed: lower is better",
        y_label="relative to FSDP2",
        note="All compiled; decoder of 34 M parameters on 2 CPU ranks. Medians of ratios within rounds, quartiles.",
    )


def _times(recorded: Sequence[Mapping[str, Any]]) -> list[Bar | None]:
    samples = [
        StepSample(**{key: value for key, value in each.items() if key != "is_clean"})
        for each in recorded
    ]
    spreads = {arm: summarize(paired_ratios(samples, arm, _BASE)) for arm in _ARMS}
    return [
        spread and (Bar(1.0) if arm == _BASE else Bar(spread.median, spread.low, spread.high))
        for arm, spread in spreads.items()
    ]


if __name__ == "__main__":
    _CHART.write_text(overview(json.loads(_RESULTS.read_text())))
