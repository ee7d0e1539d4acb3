"""Progress while a run trains: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

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

from torchloom.recipes.train.metrics import EvalRow, Sink, StepRow


def make_progress(
    console: Console,
    *,
    steps: int,
    done: int,
    log_every: int,
    compiles: bool,
    unit: str,
    phase: Callable[[], str] = str,
) -> Sink:
    """Return the display that fits the console.

    Args:
        console: where to show it.
        steps: steps of the whole run.
        done: steps done before this process began.
        log_every: steps between two plain lines.
        compiles: whether the first step also compiles; it is announced as such.
        unit: what a token is, for the unit of the loss.
        phase: says what a compile is busy with and since when, "" while nothing is compiled.
    """
    first = "compiling" if compiles else "first step"
    if console.is_terminal:
        return BarDisplay(console, steps=steps, done=done, first=first, unit=unit, phase=phase)
    return LineDisplay(
        console, steps=steps, log_every=log_every, first=first, unit=unit, phase=phase
    )


class _PhaseColumn(ProgressColumn):
    """What a compile is busy with: drawn anew by the bar's own thread while the compiler works."""

    max_refresh = 0.5

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self._phase = phase

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        return Text(self._phase(), style="dim")


@final
class BarDisplay:
    """A live bar with the last step's numbers; evaluations stay above it as lines."""

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        done: int,
        first: str,
        unit: str,
        phase: Callable[[], str] = str,
    ) -> None:
        self._console = console
        self._first = first
        self._unit = unit
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            _PhaseColumn(phase),
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
    """One line for the first step and for every `log_every`-th one after it; of a long compile also what it does."""

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        log_every: int,
        first: str,
        unit: str,
        phase: Callable[[], str] = str,
        phase_every_s: float = 15.0,
    ) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._first = first
        self._unit = unit
        self._started = time.perf_counter()
        self._phase, self._phase_every_s = phase, phase_every_s
        self._is_over = threading.Event()
        threading.Thread(target=self._tell_phases, daemon=True).start()

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
            self._is_over.set()

    def close(self) -> None:
        """Stop telling what a compile does."""
        self._is_over.set()

    def _tell_phases(self) -> None:
        while not self._is_over.wait(self._phase_every_s):
            if text := self._phase():
                self._print(f"compiling: {text}")

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
