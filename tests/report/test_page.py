"""The page as text: what it holds, what it must never hold, and the trace beside it."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from report.sessions import (
    HOSTILE,
    big_session,
    hostile_session,
    run_session,
    small_session,
)
from support.page_records import packed_in, record_in
from torchloom.records import EventRow, Session
from torchloom.report.page import render_page, to_trace, write_trace
from torchloom.report.page.figures import run_figures
from torchloom.report.page.render import views


class _Tags(HTMLParser):
    """Collect start tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


MAX_BYTES = 3_000_000


def test_the_page_is_made_without_torch():
    code = (
        "import sys\n"
        "from torchloom.records import Session\n"
        "from torchloom.report.page import render_page, to_trace\n"
        "assert render_page(Session()).startswith('<!doctype html>')\n"
        "to_trace(Session())\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_record_comes_back_from_the_page():
    session = small_session()
    from torchloom.records import from_json

    assert from_json(record_in(packed_in(render_page(session)))) == session


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_record_becomes_markup(text: str):
    page = render_page(hostile_session(text), title=text)
    tags = _Tags(page).tags
    assert [tag for tag, _ in tags].count("script") == 2
    assert "img" not in [tag for tag, _ in tags]
    assert not [key for _, attrs in tags for key in attrs if key.startswith("on")]


def test_the_page_loads_nothing():
    page = render_page(small_session())
    loads = [
        (tag, attrs)
        for tag, attrs in _Tags(page).tags
        if tag in {"link", "iframe", "img", "object", "embed", "base"} or "src" in attrs
    ]
    assert loads == []
    hrefs = [attrs["href"] for tag, attrs in _Tags(page).tags if "href" in attrs]
    assert all(href and href.startswith("#") for href in hrefs)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!#)|sourceMappingURL|\bfetch\(|XMLHttpRequest", page)


def test_no_script_writes_markup():
    assets = Path(sys.modules[render_page.__module__].__file__ or "").parent / "assets"
    for script in assets.glob("*.js"):
        text = script.read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        )


def test_every_script_and_style_is_in_the_page():
    assets = Path(sys.modules[render_page.__module__].__file__ or "").parent / "assets"
    page = render_page(Session())
    for path in [*assets.glob("*.js"), *assets.glob("*.css")]:
        assert path.read_text("utf-8").strip().splitlines()[0] in page, path.name


def test_the_script_is_the_one_that_the_policy_allows():
    import hashlib

    page = render_page(Session())
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page or f"'sha256-{digest}'" in page


def test_the_page_of_a_large_model_stays_small():
    session = big_session(num_layers=30)
    raw = sum(len(a.text) for e in session.entries() for a in e.artifacts)
    page = render_page(session)
    assert raw > 4_000_000, "the record is not large enough to tell anything"
    assert len(page.encode()) < MAX_BYTES


def test_numbers_that_json_lacks_and_broken_text_do_not_stop_the_page():
    session = small_session()
    session.overhead["tap_ms"] = float("nan")
    session.functions[0].file = "/tmp/\udcff.py"
    assert packed_in(render_page(session))["record"]["overhead"]["tap_ms"] == "nan"


def test_licences_of_the_libraries_stand_in_the_page():
    page = render_page(Session())
    for name in ("htm-preact-3.1.1", "uplot-1.6.32", "dagre-3.1.3", "jsdiff-5.2.0"):
        assert name in page
    assert page.count("Permission is hereby granted, free of charge") >= 2


def test_a_trace_is_valid_and_knows_its_tracks(tmp_path: Path):
    path = write_trace(run_session(), tmp_path / "trace.json")
    trace = json.loads(path.read_text("utf-8"))
    rows = trace["traceEvents"]
    assert {row["pid"] for row in rows} == {1}
    slices = [row for row in rows if row["ph"] == "X"]
    assert all(row["dur"] >= 0 and row["ts"] > 0 for row in slices)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert set(names.values()) == {
        "compile 0/0 f", "phases", "gather", "reduce",
    }  # fmt: skip
    assert {row["tid"] for row in slices} == set(names)


def test_collectives_that_overlap_lie_on_tracks_of_their_own():
    session = run_session()
    for row in session.events:
        row.data["op"] = "gather"
    slices = [row for row in to_trace(session)["traceEvents"] if row.get("cat") == "gather"]
    rows = [row for row in slices if row["name"] != "wait"]
    assert len(rows) == 12
    assert len({row["tid"] for row in rows}) == 2
    for one in rows:
        for other in rows:
            if one is not other and one["tid"] == other["tid"]:
                apart = one["ts"] + one["dur"] <= other["ts"] + 1
                assert apart or other["ts"] + other["dur"] <= one["ts"] + 1


KINDS = (
    "PassRan", "BodyWoven", "ProgramReady", "PassesSkipped", "CompileStarted", "CompileFinished",
    "LoweredCompiled", "PlanReviewed", "BackendChosen", "CollectiveRan", "PhaseRan", "StepSkipped",
    "StepEnded", "PlanCompared", "OwnersChosen", "FromLater",
)  # fmt: skip
FIELDS = (
    "name", "graph", "num_edits", "duration_s", "layers", "seconds", "reason", "num_nodes", "backend",
    "failed", "op", "params", "num_tensors", "num_bytes", "start_s", "wait_s", "end_s", "phase", "step",
    "loss", "measured_peak_bytes", "predicted_peak_bytes", "measured_seconds", "boxes", "num_graphs",
    "verdicts", "num_calls", "lowered", "stage", "recompiles", "predicted_seconds", "tokens_per_second",
    "optimizer", "parameters", "num_divided", "step_bytes",
)  # fmt: skip


@pytest.mark.parametrize("value", [None, "<b>", 3, -1.5, [3, None], {"a": [1]}, True])
def test_no_event_is_too_damaged_for_the_page(value: object):
    session = small_session()
    fields = [{}, *(dict.fromkeys(FIELDS[:n], value) for n in (4, 17, 19, len(FIELDS)))]
    for kind, data in itertools.product(KINDS, fields):
        session.events.append(EventRow(kind=kind, at_s=1e9, data=data))
    shown = json.dumps(views(session, run_figures(session)))
    assert "Traceback" not in shown
