"""Progress while a run trains: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torchloom.recipes.train.metrics import Log, Row


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
