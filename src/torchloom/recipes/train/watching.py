"""The option --report: a record of compilation and of the first steps, and its HTML page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torchloom
from torchloom.events import CollectiveRan, Recorder, StepEnded
from torchloom.recipes.train.metrics import EvalRow, StepRow
from torchloom.records import EventRow, Session, save_record

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
        self.write_page()

    def write_page(self) -> None:
        """Write the page, with what other ranks have recorded by now."""
        page = self._out / "report.html"
        torchloom.report.write_page(self._watch.record, page, run=self._out)


class RankSink:
    """Records steps and collectives of another rank as long; at the end writes `record-rankN.json`.

    Args:
        out: the run's folder.
        rank: this rank.
        world_size: number of ranks.
        done: steps done before this start.
    """

    def __init__(self, out: Path, *, rank: int, world_size: int, done: int) -> None:
        self._path, self._last = out / f"record-rank{rank}.json", done + _NUM_STEPS
        self._session = Session(rank=rank, world_size=world_size)
        self._open = ExitStack()
        self._recorder = self._open.enter_context(Recorder())

    def log(self, row: StepRow | EvalRow) -> None:
        """Stop recording when enough has been seen."""
        if row.step >= self._last:
            self._open.close()

    def close(self) -> None:
        """Stop recording and write what was seen."""
        self._open.close()
        self._session.events = [
            EventRow(kind=type(event).__name__, at_s=event.at_s, data=event.to_dict())
            for event in self._recorder.events
            if isinstance(event, (StepEnded, CollectiveRan))
        ]
        save_record(self._session, self._path)
