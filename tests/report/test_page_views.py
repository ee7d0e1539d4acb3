"""The views that Python writes for the page: of damaged events, and of many."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from report.test_page_records import run_session, small_session
from torchloom.records import EventRow, Session
from torchloom.report.page.figures import run_figures
from torchloom.report.page.render import views

KINDS = (
    "PassRan", "BodyWoven", "ProgramReady", "PassesSkipped", "CompileStarted", "CompileFinished",
    "LoweredCompiled", "PlanReviewed", "BackendChosen", "CollectiveRan", "PhaseRan", "StepSkipped",
    "StepEnded", "PlanCompared", "FromLater",
)  # fmt: skip
FIELDS = (
    "name", "graph", "num_edits", "duration_s", "layers", "seconds", "reason", "num_nodes", "backend",
    "failed", "op", "params", "num_tensors", "num_bytes", "start_s", "wait_s", "end_s", "phase", "step",
    "loss", "measured_peak_bytes", "predicted_peak_bytes", "measured_seconds", "boxes", "num_graphs",
    "verdicts", "num_calls", "lowered", "stage", "recompiles", "predicted_seconds", "tokens_per_second",
)  # fmt: skip


@pytest.mark.parametrize("value", [None, "<b>", 3, -1.5, [3, None], {"a": [1]}, True])
def test_no_event_is_too_damaged_for_the_page(value: object):
    session = small_session()
    fields = [{}, *(dict.fromkeys(FIELDS[:n], value) for n in (4, 17, 19, len(FIELDS)))]
    for kind, data in itertools.product(KINDS, fields):
        session.events.append(EventRow(kind=kind, at_s=1e9, data=data))
    shown = json.dumps(views(session, run_figures(session)))
    assert "Traceback" not in shown


def test_many_events_take_no_time_for_each_pair_of_them():
    session = run_session()
    kinds = {"PhaseRan", "CollectiveRan", "StepEnded"}
    rows = [row for row in session.events if row.kind in kinds]
    for i in range(1, 1000):
        for row in rows:
            times = {
                k: v + 2 * i for k, v in row.data.items() if k.endswith("_s") and k != "duration_s"
            }
            step = {"step": row.data["step"] + 2 * i} if "step" in row.data else {}
            session.events.append(
                EventRow(kind=row.kind, at_s=row.at_s + 2 * i, data=row.data | times | step)
            )
    start = time.process_time()
    found = views(session, None)
    assert time.process_time() - start < 5
    assert len(found["timeline"]["steps"]) == 2000


def test_an_empty_record_has_views():
    assert views(Session(), None)["timeline"] == {
        "lanes": [], "bars": [], "steps": [], "steady": None,
    }  # fmt: skip
