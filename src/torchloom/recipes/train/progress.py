"""Progress while a run trains: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torchloom.recipes.train.metrics import EvalRow, Sink, StepRow


def make_progress(
    console: Console, *, steps: int, done: int, log_every: int, compiles: bool, unit: str
) -> Sink:
    """Return the display that fits the console.

    Args:
        console: where to show it.
        steps: steps of the whole run.
        done: steps done before this process began.
        log_every: steps between two plain lines.
        compiles: whether the first step also compiles; it is announced as such.
        unit: what a token is, for the unit of the loss.
    """
    first = "compiling" if compiles else "first step"
    if console.is_terminal:
        return BarDisplay(console, steps=steps, done=done, first=first, unit=unit)
    return LineDisplay(console, steps=steps, log_every=log_every, first=first, unit=unit)


@final
class BarDisplay:
    """A live bar with the last step's numbers; evaluations stay above it as lines."""

    def __init__(self, console: Console, *, steps: int, done: int, first: str, unit: str) -> None:
        self._console = console
        self._first = first
        self._unit = unit
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps, completed=done, numbers="evaluating")
        self._progress.start()

    def log(self, row: StepRow | EvalRow) -> None:
        """Show a row."""
        if isinstance(row, EvalRow):
            self._console.print(eval_text(row, self._unit))
            if self._first:
                self._progress.update(self._task, numbers=self._first)
        else:
            self._first = ""
            self._progress.update(self._task, completed=row.step, numbers=step_text(row))

    def close(self) -> None:
        """Stop drawing; the bar stays as it is."""
        self._progress.stop()


@final
class LineDisplay:
    """One line for the first step and for every `log_every`-th one after it."""

    def __init__(
        self, console: Console, *, steps: int, log_every: int, first: str, unit: str
    ) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._first = first
        self._unit = unit
        self._started = time.perf_counter()

    def log(self, row: StepRow | EvalRow) -> None:
        """Print a row if its turn has come."""
        if isinstance(row, EvalRow):
            self._print(eval_text(row, self._unit))
            if self._first:
                self._print(f"{self._first} ...")
        elif self._first or row.step % self._log_every == 0 or row.step == self._steps:
            elapsed_s = time.perf_counter() - self._started
            self._print(f"step {row.step}/{self._steps}  {step_text(row)}  ({elapsed_s:.0f} s)")
        if isinstance(row, StepRow):
            self._first = ""

    def close(self) -> None:
        """Nothing is held back."""

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)
        self._console.file.flush()


def step_text(row: StepRow) -> str:
    """Return a step's numbers as one short line."""
    parts = [
        f"loss {row.loss:.3f}",
        f"{row.tokens_per_s:,.0f} tokens/s",
        f"{row.step_time_s * 1000:.0f} ms/step",
        f"{row.memory_gib:.2f} GiB",
    ]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    return "  ".join(parts)


def eval_text(row: EvalRow, unit: str) -> str:
    """Return an evaluation as one short line."""
    return f"step {row.step}: held-out loss {row.heldout_loss:.3f} nats/{unit}"
