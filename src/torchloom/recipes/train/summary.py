"""The results of a run: a table in the terminal, charts over its steps, one `summary.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchloom.files import write_whole
from torchloom.recipes.train.metrics import Row
from torchloom.report import Series, line_chart


def summarize(rows: Sequence[Row], **facts: Any) -> dict[str, Any]:
    """Return the figures of a whole run, those of resumed parts included; None where one is not known.

    Times and rates are medians over steps; `tokens_per_s` counts all ranks, `tflops_per_s` one.

    Args:
        rows: the lines of `metrics.jsonl`.
        **facts: what rows do not tell.
    """
    steps, evals = _of_kind(rows, "step"), _of_kind(rows, "eval")

    def median(key: str) -> float | None:
        values = [row[key] for row in steps if row[key] is not None]
        return statistics.median(values) if values else None

    num_bytes = median("collective_bytes")
    return {
        **facts,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "heldout_loss_first": evals[0]["heldout_loss"] if evals else None,
        "heldout_loss_last": evals[-1]["heldout_loss"] if evals else None,
        "heldout_step_last": evals[-1]["step"] if evals else None,
        "step_time_median_s": median("step_time_s"),
        **{key: median(key) for key in ("tokens_per_s", "tflops_per_s", "mfu")},
        "collectives_per_step": median("collectives"),
        "collective_mib_per_step": None if num_bytes is None else num_bytes / 2**20,
    }


def print_summary(console: Console, summary: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Print the figures as a table, and below it the files of the run.

    Args:
        console: where to print.
        summary: the figures.
        files: paths by name.
    """
    stopped = summary["stopped_by"]
    title = f"{summary['model']}: {f'stopped by {stopped}' if stopped else 'done'}"
    table = Table(title=title, show_header=False, title_justify="left")

    def add(name: str, form: str, *keys: str, absent: str = "n/a") -> None:
        is_known = all(summary[key] is not None for key in keys)
        table.add_row(name, form.format(**summary) if is_known else absent)

    is_evaluated_last = summary["heldout_step_last"] == summary["steps"]
    when = "" if is_evaluated_last else ", step {heldout_step_last}"
    loss = "{heldout_loss_first:.3f} -> {heldout_loss_last:.3f} nats/{unit}"
    fallbacks = ", {num_fallbacks} ran eagerly" if summary["num_fallbacks"] else ""
    graphs = "1 graph" if summary["num_graphs"] == 1 else "{num_graphs} graphs"
    compiled = graphs + " in {compile_time_s:.0f} s" + fallbacks
    add("parameters", f"{summary['num_params'] / 1e6:.2f} M")
    add("ranks", "{world_size} on {device}, ZeRO-{zero_stage}")
    add("steps", "{steps:,} ({tokens:,} {unit}s)")
    add("held-out loss", loss + when, "heldout_loss_first")
    milliseconds = 1000 * (summary["step_time_median_s"] or 0)
    add("step time, median", f"{milliseconds:.0f} ms", "step_time_median_s")
    add("throughput", "{tokens_per_s:,.0f} tokens/s", "tokens_per_s")
    add("useful work", "{tflops_per_s:.3f} TFLOP/s per rank", "tflops_per_s")
    add("MFU", "{mfu:.1%}", "mfu", absent="n/a (no known peak)")
    add("peak memory", "{peak_memory_gib:.2f} GiB per rank", "peak_memory_gib")
    collectives = "{collectives_per_step:.0f} per step, {collective_mib_per_step:.2f} MiB"
    add("collectives", collectives, "collectives_per_step")
    add("compiled", compiled if summary["num_graphs"] else "nothing, ran eagerly")
    console.print(table)
    for name, path in files.items():
        console.print(f"{name:<12}{path}", soft_wrap=True, highlight=False)


def write_charts(out: Path, rows: Sequence[Row], summary: Mapping[str, Any]) -> dict[str, Path]:
    """Draw loss, step time, throughput and memory over the steps.

    Args:
        out: the run's folder.
        rows: the lines of `metrics.jsonl`.
        summary: the figures of the run, for the note below each chart.

    Returns:
        The files by name; none if there was no step.
    """
    steps, evals = _of_kind(rows, "step"), _of_kind(rows, "eval")
    if not steps:
        return {}
    size = f"{summary['num_params'] / 1e6:.1f} M parameters"
    note = "{model}, {size}, ZeRO-{zero_stage}, {world_size} ranks on {device}".format(
        size=size, **summary
    )

    def series(label: str, key: str, scale: float = 1, of: Sequence[Row] = steps) -> Series:
        values = [row[key] * scale for row in of]
        return Series(label, [row["step"] for row in of], values, has_markers=of is evals)

    unit = summary["unit"]
    charts = {
        "loss": (
            ("Loss", f"nats per {unit}"),
            series("training loss", "loss"),
            series("held-out loss", "heldout_loss", of=evals),
        ),
        "step_time": (
            ("Step time (a first step that compiles is slow)", "milliseconds, logarithmic"),
            series("step time", "step_time_s", 1000),
        ),
        "throughput": (("Throughput", f"{unit}s per second"), series("all ranks", "tokens_per_s")),
        "memory": (
            ("Memory of rank 0", "GiB"),
            series("in use", "memory_gib"),
            series("peak so far", "peak_memory_gib"),
        ),
    }
    files = {}
    for name, ((title, y_label), *drawn) in charts.items():
        log_y, x_label = name == "step_time", "optimizer step"
        svg = line_chart(
            drawn, title=title, x_label=x_label, y_label=y_label, note=note, log_y=log_y
        )
        files[name] = write_whole(out / f"{name}.svg", svg)
    return files


def _of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]
