"""The option --report: a record of compilation and of the first steps, and its HTML page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torchloom
from torchloom.recipes.train.metrics import EvalRow, StepRow

_NUM_STEPS = 8
"""Number of steps that are watched: enough for a timeline; the record stays a few MB."""


class WatchSink:
    """Watches until some steps are done; at the end writes `record.json` and `report.html`.

    Args:
        out: the run's folder.
        done: steps done before this start.
    """

    def __init__(self, out: Path, *, done: int) -> None:
        self._out, self._last = out, done + _NUM_STEPS
        self._open = ExitStack()
        self._watch = self._open.enter_context(torchloom.watch())

    def log(self, row: StepRow | EvalRow) -> None:
        """Stop watching when enough has been seen."""
        if row.step >= self._last:
            self._open.close()

    def close(self) -> None:
        """Stop watching and write what was seen."""
        self._open.close()
        self._watch.to_json(self._out / "record.json")
        torchloom.report.write_page(self._watch.record, self._out / "report.html")
