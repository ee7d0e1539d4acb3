"""Progress while a run trains: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from torchloom.recipes.train.metrics import Log, Row


class _PhaseColumn(ProgressColumn):
    """What a compile is busy with: drawn anew by the bar's own thread while the compiler works."""

    max_refresh = 0.5

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self._phase = phase

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        return Text(self._phase(), style="dim")


@contextmanager
def bar(
    console: Console, *, steps: int, done: int, first: str, unit: str, phase: Callable[[], str]
) -> Iterator[Log]:
    """Show a live bar with the last step's numbers; evaluations stay above it as lines.

    Args:
        console: the terminal.
        steps: steps of the whole run.
        done: steps done before this process began.
        first: what the first step does, such as "compiling".
        unit: what a token is, for the unit of the loss.
        phase: says what a compile is busy with and since when, "" while nothing is compiled.
    """
    progress = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        _PhaseColumn(phase),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("", total=steps, completed=done, numbers="evaluating")

    def log(row: Row) -> None:
        if row["kind"] == "step":
            progress.update(task, completed=row["step"], numbers=step_text(row))
        else:
            console.print(eval_text(row, unit))
            if row["step"] == done:
                progress.update(task, numbers=first)

    with progress:
        yield log


@contextmanager
def lines(
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
    """Print one line for the first step and every `log_every`-th one; of a long compile also what it does.

    Args:
        console: where to print.
        steps: steps of the whole run.
        done: steps done before this process began.
        log_every: steps between two lines.
        first: what the first step does, such as "compiling".
        unit: what a token is, for the unit of the loss.
        phase: says what a compile is busy with and since when, "" while nothing is compiled.
        phase_every_s: seconds between two lines of a long compile.
    """
    started, is_over = time.perf_counter(), threading.Event()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)
        console.file.flush()

    def tell_phases() -> None:
        while not is_over.wait(phase_every_s):
            if text := phase():
                say(f"compiling: {text}")

    def log(row: Row) -> None:
        step = row["step"]
        if row["kind"] == "step":
            is_over.set()
            if step in (done + 1, steps) or step % log_every == 0:
                elapsed_s = time.perf_counter() - started
                say(f"step {step}/{steps}  {step_text(row)}  ({elapsed_s:.0f} s)")
        else:
            say(eval_text(row, unit))
            if step == done:
                say(f"{first} ...")

    threading.Thread(target=tell_phases, daemon=True).start()
    try:
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
