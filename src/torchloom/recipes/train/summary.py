"""The results of a run: a table in the terminal, charts over its steps, one `summary.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchloom.files import write_whole
from torchloom.report import Series, line_chart


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a whole run, those of resumed parts included."""

    model: str
    num_params: int
    unit: str
    world_size: int
    device: str
    zero_stage: int
    steps: int
    tokens: int
    heldout_loss_first: float | None
    heldout_loss_last: float | None
    heldout_step_last: int | None
    step_time_median_s: float | None
    tokens_per_s: float | None
    """All ranks together, at the median step time."""
    tflops_per_s: float | None
    """Per rank, at the median step time."""
    mfu: float | None
    peak_memory_gib: float | None
    """The largest of all ranks."""
    collectives_per_step: float | None
    collective_mib_per_step: float | None
    compile_time_s: float
    """Of this process's part of the run; 0 when it ran eagerly."""
    num_graphs: int
    num_fallbacks: int
    """Graphs that the compiler could not weave and that ran eagerly."""
    stopped_by: str | None
    checkpoint: str


def summarize(rows: Sequence[Mapping[str, Any]], **facts: Any) -> Summary:
    """Reduce the rows of a run to its figures.

    Args:
        rows: the lines of `metrics.jsonl`.
        **facts: the fields of `Summary` that rows do not tell.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    return Summary(
        tokens=steps[-1]["tokens"] if steps else 0,
        heldout_loss_first=evals[0]["heldout_loss"] if evals else None,
        heldout_loss_last=evals[-1]["heldout_loss"] if evals else None,
        heldout_step_last=evals[-1]["step"] if evals else None,
        step_time_median_s=_median(steps, "step_time_s"),
        tokens_per_s=_median(steps, "tokens_per_s"),
        tflops_per_s=_median(steps, "tflops_per_s"),
        mfu=_median(steps, "mfu"),
        collectives_per_step=_median(steps, "collectives"),
        collective_mib_per_step=_median(steps, "collective_bytes", scale=2**-20),
        **facts,
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write the figures as JSON."""
    write_whole(path, json.dumps(asdict(summary), indent=2) + "\n")


def print_summary(console: Console, summary: Summary, files: Mapping[str, Path]) -> None:
    """Print the figures as a table, and below it the files of the run.

    Args:
        console: where to print.
        summary: the figures.
        files: paths by name.
    """
    title = (
        f"{summary.model}: {'stopped by ' + summary.stopped_by if summary.stopped_by else 'done'}"
    )
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in _table_rows(summary):
        table.add_row(name, value)
    console.print(table)
    for name, path in files.items():
        console.print(f"{name:<12}{path}", soft_wrap=True, highlight=False)


def write_charts(out: Path, rows: Sequence[Mapping[str, Any]], summary: Summary) -> list[Path]:
    """Draw loss, step time, throughput and memory over the steps.

    Args:
        out: the run's folder.
        rows: the lines of `metrics.jsonl`.
        summary: the figures of the run, for the note below each chart.

    Returns:
        The files; none if there was no step.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    if not steps:
        return []
    xs = [row["step"] for row in steps]
    note = (
        f"{summary.model}, {summary.num_params / 1e6:.1f} M parameters, "
        f"ZeRO-{summary.zero_stage}, {summary.world_size} ranks on {summary.device}"
    )

    def over_steps(label: str, key: str, scale: float = 1) -> Series:
        return Series(label, xs, [row[key] * scale for row in steps])

    def draw(name: str, title: str, y_label: str, *series: Series, log_y: bool = False) -> Path:
        svg = line_chart(
            series, title=title, x_label="optimizer step", y_label=y_label, note=note, log_y=log_y
        )
        return write_whole(out / f"{name}.svg", svg)

    heldout = Series(
        "held-out loss",
        [row["step"] for row in evals],
        [row["heldout_loss"] for row in evals],
        has_markers=True,
    )
    title = "Step time (a first step that compiles is slow)"
    step_time = over_steps("step time", "step_time_s", 1000)
    memory = over_steps("in use", "memory_gib"), over_steps("peak so far", "peak_memory_gib")
    unit = summary.unit
    return [
        draw("loss", "Loss", f"nats per {unit}", over_steps("training loss", "loss"), heldout),
        draw("step_time", title, "milliseconds, logarithmic", step_time, log_y=True),
        draw(
            "throughput",
            "Throughput",
            f"{unit}s per second",
            over_steps("all ranks", "tokens_per_s"),
        ),
        draw("memory", "Memory of rank 0", "GiB", *memory),
    ]


def _table_rows(summary: Summary) -> list[tuple[str, str]]:
    steps = [
        ("parameters", f"{summary.num_params / 1e6:.2f} M"),
        ("ranks", f"{summary.world_size} on {summary.device}, ZeRO-{summary.zero_stage}"),
        ("steps", f"{summary.steps:,} ({summary.tokens:,} {summary.unit}s)"),
        ("held-out loss", _heldout_text(summary)),
    ]
    speed = [
        ("step time, median", _with_unit(summary.step_time_median_s, "ms", 1000, ".0f")),
        ("throughput", _with_unit(summary.tokens_per_s, "tokens/s", 1, ",.0f")),
        ("useful work", _with_unit(summary.tflops_per_s, "TFLOP/s per rank", 1, ".3f")),
        ("MFU", "n/a (no known peak)" if summary.mfu is None else f"{summary.mfu:.1%}"),
        ("peak memory", _with_unit(summary.peak_memory_gib, "GiB per rank", 1, ".2f")),
    ]
    mib = _with_unit(summary.collective_mib_per_step, "MiB", 1, ".2f")
    count = _with_unit(summary.collectives_per_step, "per step", 1, ".0f")
    return [
        *steps,
        *speed,
        ("collectives", f"{count}, {mib}"),
        ("compiled", _compile_text(summary)),
    ]


def _compile_text(summary: Summary) -> str:
    if not summary.num_graphs:
        return "nothing, ran eagerly"
    fallbacks = f", {summary.num_fallbacks} ran eagerly" if summary.num_fallbacks else ""
    graphs = "1 graph" if summary.num_graphs == 1 else f"{summary.num_graphs} graphs"
    return f"{graphs} in {summary.compile_time_s:.0f} s{fallbacks}"


def _heldout_text(summary: Summary) -> str:
    first, last = summary.heldout_loss_first, summary.heldout_loss_last
    if first is None or last is None:
        return "n/a"
    when = (
        "" if summary.heldout_step_last == summary.steps else f", step {summary.heldout_step_last}"
    )
    return f"{first:.3f} -> {last:.3f} nats/{summary.unit}{when}"


def _with_unit(value: float | None, unit: str, scale: float, digits: str) -> str:
    return "n/a" if value is None else f"{value * scale:{digits}} {unit}"


def _median(rows: Sequence[Mapping[str, Any]], key: str, *, scale: float = 1.0) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) * scale if values else None
