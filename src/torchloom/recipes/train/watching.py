"""A record of the beginning of a run: its compile and its first steps."""

from __future__ import annotations

from pathlib import Path

from torchloom.cli.train.metrics import EvalRow, StepRow
from torchloom.inspect import Watch
from torchloom.records import save_record
from torchloom.report.page import write_page

_NUM_STEPS = 8
"""Steps after the start that are watched: enough for a timeline, little enough to keep."""


class WatchSink:
    """Watches until some steps are done; at the end writes `record.json` and `report.html`.

    Args:
        out: the run's folder.
        done: steps done before this start.
    """

    def __init__(self, out: Path, *, done: int) -> None:
        self._out, self._last = out, done + _NUM_STEPS
        self._watch = Watch()
        self._watch.__enter__()
        self._is_open = True

    def log(self, row: StepRow | EvalRow) -> None:
        """Stop watching when enough has been seen."""
        if row.step >= self._last:
            self._stop()

    def close(self) -> None:
        """Stop watching and write what was seen."""
        self._stop()
        save_record(self._watch.record, self._out / "record.json")
        write_page(self._watch.record, self._out / "report.html")

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            self._watch.__exit__(None, None, None)
