"""Keep, show and sum up the rows of a run: files, a progress bar or lines, a table, charts, `summary.json`.

`metrics.jsonl` holds one JSON object per line, written by rank 0. Rows of kind `step`:

    step                      optimizer steps done, counted from 1
    loss                      mean over ranks and micro-steps, nats per byte (or token)
    lr, grad_norm             grad_norm is over the whole model, before clipping
    tokens                    tokens seen since the run began, all ranks together
    step_time_s, data_time_s  wall clock of the step, and its part spent waiting for data
    tokens_per_s              all ranks together
    tflops_per_s              per rank, useful work only, by `engine.work.flops_per_token`
    mfu                       tflops_per_s / dense bf16 peak; null where no peak is known
    memory_gib, peak_memory_gib   of rank 0: device memory in use, or resident memory on CPU
    collectives, collective_bytes   issued by rank 0 in this step

Rows of kind `eval` hold `step` and `heldout_loss`. A value that is not known is null.
TensorBoard gets the same numbers under the names of `TENSORBOARD_TAGS`.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import torchloom
from torchloom.events import CollectiveRan, Recorder, StepEnded
from torchloom.files import open_to_append, read_json_lines, write_whole
from torchloom.records import EventRow, Session, save_record
from torchloom.report import Series, line_chart

Row = dict[str, Any]
Log = Callable[[Row], object]
"""Takes a row to where it is kept or shown."""

TENSORBOARD_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "heldout_loss": "loss_metrics/heldout_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_s": "throughput(tps)",
    "tflops_per_s": "tflops",
    "mfu": "mfu",
    "step_time_s": "time_metrics/end_to_end(s)",
    "data_time_s": "time_metrics/data_loading(s)",
    "memory_gib": "memory/active(GiB)",
    "peak_memory_gib": "memory/max_active(GiB)",
    "collectives": "comm/collectives",
    "collective_bytes": "comm/bytes",
}
_NUM_WATCHED = 8
"""Number of steps that --report watches: enough for a timeline; the record stays a few MB."""


@contextmanager
def json_lines(path: Path, *, done: int = 0) -> Iterator[Log]:
    """Append rows to a file, each line flushed, so that a killed run keeps what it wrote.

    Args:
        path: the file.
        done: keep the rows up to this step; a resumed run writes the later ones anew.
    """
    kept = [row for row in read_json_lines(path) if row["step"] <= done] if done else []
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in kept))
    with open_to_append(path) as file:
        yield lambda row: print(json.dumps(row), file=file, flush=True)


@contextmanager
def tensorboard(folder: Path) -> Iterator[Log]:
    """Write the known numbers of rows as TensorBoard scalars; needs the package tensorboard."""
    from torch.utils.tensorboard import SummaryWriter  # an optional package

    with SummaryWriter(str(folder)) as writer:

        def log(row: Row) -> None:
            for key, tag in TENSORBOARD_TAGS.items():
                if row.get(key) is not None:
                    writer.add_scalar(tag, row[key], row["step"])

        yield log


@contextmanager
def watched(out: Path, *, rank: int, world_size: int, done: int) -> Iterator[Log]:
    """Watch some steps; at the end rank 0 writes `record.json` and `report.html`, other ranks `record-rankN.json`.

    Args:
        out: the run's folder.
        rank: this rank; others than rank 0 record steps and collectives alone.
        world_size: number of ranks.
        done: steps done before this start.
    """
    with ExitStack() as until_seen:
        watch = until_seen.enter_context(torchloom.watch() if rank == 0 else Recorder())
        try:
            yield lambda row: until_seen.close() if row["step"] >= done + _NUM_WATCHED else None
        finally:
            until_seen.close()
            if isinstance(watch, Recorder):
                rows = [e for e in watch.events if isinstance(e, (StepEnded, CollectiveRan))]
                session = Session(rank=rank, world_size=world_size)
                session.events = [
                    EventRow(kind=type(e).__name__, at_s=e.at_s, data=e.to_dict()) for e in rows
                ]
                save_record(session, out / f"record-rank{rank}.json")
            else:
                watch.to_json(out / "record.json")
                torchloom.report.write_page(watch.record, out / "report.html", run=out)


def memory_gib(device: torch.device) -> tuple[float, float]:
    """Return memory in use and its peak so far: of the device, or of this process on CPU."""
    if device.type == "cuda":
        in_use = torch.cuda.memory_allocated(device)
        return in_use / 2**30, torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    in_use = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    if statm.is_file():
        in_use = int(statm.read_text().split()[1]) * resource.getpagesize()
    return in_use / 2**30, max(
        in_use, peak
    ) / 2**30  # the kernel updates the two at different times


@contextmanager
def shown(
    console: Console,
    *,
    steps: int,
    done: int,
    log_every: int,
    first: str,
    unit: str,
    phase: Callable[[], str],
    phase_every_s: float = 15.0,
) -> Iterator[Log]:
    """Show a live bar with the last step's numbers, and evaluations above it; elsewhere than in a terminal lines.

    Args:
        console: where to show it.
        steps: steps of the whole run.
        done: steps done before this process began.
        log_every: steps between two lines.
        first: what the first step does, such as "compiling".
        unit: what a token is, for the unit of the loss.
        phase: says what a compile is busy with and since when, "" while nothing is compiled.
        phase_every_s: seconds between two lines of a long compile.
    """
    is_bar = console.is_terminal
    started, is_over = time.perf_counter(), threading.Event()
    numbers = TextColumn("{task.fields[numbers]}", markup=False)
    columns = BarColumn(bar_width=24), MofNCompleteColumn(), numbers, TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not is_bar)
    task = bar.add_task("", total=steps, completed=done, numbers="evaluating")

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)
        console.file.flush()

    def tell_phases() -> None:
        while not is_over.wait(0.5 if is_bar else phase_every_s):
            if not (text := phase()):
                continue
            if is_bar:
                bar.update(task, numbers=text)
            else:
                say(f"compiling: {text}")

    def log(row: Row) -> None:
        step = row["step"]
        if row["kind"] == "step":
            bar.update(task, completed=step, numbers=step_text(row))
            if not is_bar and (step in (done + 1, steps) or step % log_every == 0):
                elapsed_s = time.perf_counter() - started
                say(f"step {step}/{steps}  {step_text(row)}  ({elapsed_s:.0f} s)")
            return
        say(eval_text(row, unit))
        if step == done:
            bar.update(task, numbers=first)
            if not is_bar:
                say(f"{first} ...")

    threading.Thread(target=tell_phases, daemon=True).start()
    try:
        with bar:
            yield log
    finally:
        is_over.set()


def step_text(row: Row) -> str:
    """Return a step's numbers as one short line."""
    mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
    return (
        f"loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s  "
        f"{row['step_time_s'] * 1000:.0f} ms/step  {row['memory_gib']:.2f} GiB{mfu}"
    )


def eval_text(row: Row, unit: str) -> str:
    """Return an evaluation as one short line."""
    return f"step {row['step']}: held-out loss {row['heldout_loss']:.3f} nats/{unit}"


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
