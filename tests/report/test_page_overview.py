"""The overview of a training run: where time and memory went, the plan, torchloom's own phases."""

from __future__ import annotations

import dataclasses

import pytest

from report.test_page_records import run_session, small_session
from torchloom.records import (
    Alive,
    Decision,
    Entry,
    EventRow,
    Function,
    GraphPlan,
    Peak,
    Session,
    Span,
    Standing,
)
from torchloom.records.summary import summary

MIB = 1 << 20


def alive(kind: str, layer: str, mib: float) -> Alive:
    return Alive(kind=kind, layer=layer, num_bytes=int(mib * MIB), num_values=1)


def planned_session() -> Session:
    """Return a record of a run under a budget of 40 MiB: 10 stand, 25 of activations and more."""
    session = run_session()
    names = [f"layers.{i}.wq.weight" for i in range(3)]
    for i, row in enumerate(r for r in session.events if r.kind == "CollectiveRan"):
        row.data["params"] = names if row.data["op"] == "reduce" else [names[i % 3]]
    for lowered, duration in (("forward", 0.2), ("backward", 0.1)):
        data = {"graph": "graph0", "lowered": lowered, "duration_s": duration}
        session.events.append(EventRow(kind="LoweredCompiled", at_s=1e9, data=data))
    entry = session.functions[0].entries[0]
    entry.metrics["forward"] = {
        "entire_frame_compile_time_s": 3.0, "backend_compile_time_s": 2.0,
    }  # fmt: skip
    session.standing.append(
        Standing(
            budget_bytes=40 * MIB,
            base_bytes=11 * MIB,
            step_bytes=0,
            parts=[
                alive("parameters", "layers.0.wq", 4),
                alive("optimizer states", "layers.0.wq", 6),
            ],
        )
    )
    session.peaks.append(
        Peak(
            graph="graph0", phase="backward", node="mm_7", layer="layers.1.wq", peak_bytes=20 * MIB,
            alive=[
                alive("activations", "layers.1.wq", 12), alive("activations", "layers.0.wq", 4),
                alive("gradients", "layers.1.wq", 3), alive("gathered weights", "layers.1.wq", 1),
            ],
        )
    )  # fmt: skip
    session.plans.append(
        GraphPlan(
            graph="graph0", planning_s=0.5, num_tries=2, budget_bytes=25 * MIB,
            peak_bytes=22 * MIB, graph_peak_bytes=20 * MIB, saved_bytes=16 * MIB,
            batch_bytes=MIB, min_peak_bytes=9 * MIB, compute_us=1e5, measured_us=8e4,
            extra_us=5e3, overhead_us=2e3, copy_us=0, states_us=0, bound_us=6e3,
            resident={"layers.2.wq.weight": 4 * MIB}, bucket_bytes=0,
            decisions=[
                Decision(value="mm_1", op="mm", num_bytes=8 * MIB, action="recompute", cost_us=4e3),
                Decision(value="mm_2", op="mm", num_bytes=MIB, action="keep", cost_us=9e3,
                         where="layers.0.wq"),
                Decision(value="add_2", op="add", num_bytes=4, action="unused", cost_us=1),
            ],
        )
    )  # fmt: skip
    return session


def rows(page, name: str) -> dict[str, list[str]]:
    """Return the rows of the table of a section, by their first cell."""
    found = page.js(
        "const s = [...document.querySelectorAll('main section')].find((e) =>"
        " e.querySelector('h2').textContent === arguments[0]);"
        "return s ? [...s.querySelectorAll('table.stack')].map((t) =>"
        " [...t.querySelectorAll('tbody tr')].map((r) =>"
        " [...r.cells].map((c) => c.textContent))).flat() : []",
        name,
    )
    return {row[0]: row[1:] for row in found}


def test_the_parts_of_a_step_add_up(show):
    page = show(planned_session())
    parts = rows(page, "Where the time of a step went")
    assert set(parts) == {
        "forward", "backward", "optimizer step", "exposed communication", "between the calls",
    }  # fmt: skip
    told = " ".join(page.texts("main section .told"))
    assert "Mean of 1 step after the last compile: 990 ms per step" in told
    assert sum(float(row[1].rstrip("%")) for row in parts.values()) == pytest.approx(100, abs=0.3)
    assert parts["optimizer step"][0] == "190 ms"


def test_exposed_communication_names_layers_and_parameters(show):
    page = show(planned_session())
    moves = rows(page, "Exposed communication by layer")
    assert any("layers.0 … layers.2 (3 parameters)" in name for name in moves)
    assert moves["layers.1.wq.weight"][0] == "gather"


def test_the_peak_is_held_against_the_budget_by_kind_and_layer(show):
    page = show(planned_session())
    memory = rows(page, "Where the memory went")
    # 11 stand, 4 stay gathered, 1 of batch, 20 at the peak of the graphs, 2 more in the code
    assert "Predicted peak of this rank: 38.0 MiB of 40.0 MiB" in page.texts("main")[0]
    assert "95.0%" in page.texts("main")[0]
    assert "The peak is in backward, while mm_7 of layers.1.wq runs." in page.texts("main")[0]
    assert memory["activations"][0] == "16.0 MiB"
    assert memory["gathered weights"][0] == "5.0 MiB"
    assert memory["reserve"][0] == "1.0 MiB"
    assert memory["generated code beyond its graphs"][0] == "2.0 MiB"
    assert memory["layers.1"][-1] == "16.0 MiB"
    assert page.texts(".stacked .limit") == [""]
    assert "38.0 MiB" in page.texts(".figure strong")


def test_the_plan_gives_its_reasons(show):
    page = show(planned_session())
    reasons = page.texts(".reasons li")
    assert "may add 25.0 MiB beside the weights that stay gathered" in reasons[0]
    assert "They add 22.0 MiB at the peak, 88.0% of that" in reasons[0]
    text = " ".join(reasons)
    assert "Forward keeps 1 value (1.0 MiB) for backward." in text
    assert "Backward computes 1 value (8.0 MiB) again" in text
    assert "this takes 5.00 ms, 5.0% of compute" in text
    assert "1 weight (4.0 MiB) stays gathered" in text
    assert "80.0% of it from operators measured" in text
    assert "of 2 tries" in text
    page.click(".reasons + details summary")
    assert len(page.texts(".decisions tbody tr")) == 2


def test_the_summary_tells_what_was_measured_beside_what_was_predicted():
    session = planned_session()
    compared = {
        "step": 7, "predicted_peak_bytes": 38 * MIB, "measured_peak_bytes": 37 * MIB,
        "predicted_seconds": 0.25, "measured_seconds": 0.5,
    }  # fmt: skip
    for more, told in (
        ({}, ", forward and backward 500.0 ms (250.0 ms predicted)"),
        ({"measured_seconds": None}, ""),
    ):
        row = EventRow(kind="PlanCompared", at_s=1e9 + 1, data=compared | more)
        text = summary(dataclasses.replace(session, events=[*session.events, row]))
        line = f"  the plan after step 7: peak 37.0 MiB (38.0 MiB predicted){told}"
        assert line in text.splitlines()


def limited_session() -> Session:
    """Return a record of a function that reached its limit, and of one that Dynamo skipped."""
    session = small_session()
    f = session.functions[0]
    f.recompile_limit, f.num_eager_calls = 2, 6
    f.skipped = "the recompile limit of 2 is reached: 6 calls that no entry fits ran eagerly"
    session.functions.append(
        Function(
            name="gen", file="/home/me/f.py", line=40, skipped="failed: Unsupported: try block"
        )
    )
    session.num_unknown_eager_calls = 3
    return session


def test_a_function_at_its_limit_is_the_first_thing_to_fix(show):
    page = show(limited_session())
    first, second = page.texts(".fixes li")[:2]
    assert "the recompile limit of 2 is reached: 6 calls that no entry fits ran eagerly" in first
    assert "f" in first
    assert "3 calls" in second
    assert "9" in page.texts(".card.bad strong")
    assert "calls ran eagerly" in " ".join(page.texts(".card.bad"))
    page.open("fn/f")
    (banner,) = page.texts(".loud")
    assert "the recompile limit of 2 is reached: 6 calls that no entry fits ran eagerly" in banner


def test_functions_that_dynamo_skipped_are_listed_with_the_reason(show):
    page = show(limited_session())
    assert "Functions that run eagerly" in page.texts("h2")
    rows = page.texts(".skipped tbody tr")
    assert len(rows) == 1
    assert "gen" in rows[0]
    assert "failed: Unsupported: try block" in rows[0]


def test_what_was_not_counted_and_what_was_left_out_are_no_numbers(show):
    session = small_session()
    f = session.functions[0]
    f.qualname, f.entries[1].is_counted = "main.<locals>.f", False
    session.overhead = {"tap_ms": 2.0, "events_dropped": 7}
    page = show(session)
    told = dict(
        zip(
            page.texts(".columns section:last-child dt"),
            page.texts("section:last-child dd"),
            strict=False,
        )
    )
    assert told["events left out"] == "7"
    page.open("fn/f")
    assert "main.<locals>.f" in page.texts("dd code")
    assert "not counted" in page.texts("table.stack tbody tr")[1]
    page.open("entry/0-1")
    assert "calls servednot counted" in page.texts("dl.facts")[0]


def test_a_served_program_is_named_and_its_compile_time_is_that_of_its_spans(show):
    spans = [Span(name="bytecode_tracing", start_us=1e15, duration_us=1.5e6)]
    graph = Function(name="captured graph", file="", line=0)
    graph.entries.append(Entry(compile_id="0/0", spans=spans))
    data = {
        "model": "served.Net", "origin": "built", "key": "", "contract": "c", "seconds": 2.0,
        "boxes": ["batch 1 to 64"], "num_calls": [1], "num_graphs": 1, "verdicts": [],
    }  # fmt: skip
    event = EventRow(kind="ProgramReady", at_s=1e9, data=data)
    page = show(Session(functions=[graph], events=[event]))
    assert page.texts("h1") == ["torchloom programs: served.Net"]
    assert "1.50 s" in page.texts(".card strong")
    assert ":0" not in page.texts("main")[0]
    page.open("fn/captured graph")
    assert "captured to be served" in page.texts("main")[0]
