"""The figures that the page shows first: where they come from, and how they look in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

from report.conftest import Page
from report.sessions import small_session
from report.test_page_overview import planned_session, rows
from torchloom.records import EventRow, Session, save_record
from torchloom.report.page import write_page
from torchloom.report.page.figures import run_figures

MIB = 1 << 20


def step(number: int, seconds: float, **more: object) -> EventRow:
    data = {"step": number, "rank": 0, "seconds": seconds, "graphs": 1, **more}
    return EventRow(kind="StepEnded", at_s=2e9 + number, data=data)


def wait(number: int, seconds: float) -> EventRow:
    end_s = 2e9 + number - 0.01
    data = {
        "op": "gather", "num_tensors": 1, "num_bytes": 8, "start_s": end_s - seconds,
        "wait_s": end_s - seconds, "end_s": end_s,
    }  # fmt: skip
    return EventRow(kind="CollectiveRan", at_s=end_s, data=data)


def steps_session(rank: int = 0, waits_s: float = 0.1) -> Session:
    """Return a record of five steps of half a second, the first of which compiled."""
    session = planned_session()
    session.rank = rank
    session.events = [row for row in session.events if row.kind != "StepEnded"]
    for number, seconds in enumerate((9.0, 0.5, 0.52, 0.48, 0.5), 1):
        session.events += [
            wait(number, waits_s),
            step(number, seconds, loss=6.0 - number, tokens_per_second=100 / seconds, mfu=0.4),
        ]
    return session


def run_folder(folder: Path) -> Path:
    """Return the folder of a run of two ranks, rank 1 slower, with a metrics file."""
    save_record(steps_session(1, waits_s=0.02), folder / "record-rank1.json")
    lines = [
        {"kind": "step", "step": n, "loss": 7.5 - n, "step_time_s": 9.0 if n == 1 else 0.6,
         "tokens_per_s": 2e4, "memory_gib": 0.25, "peak_memory_gib": 0.5}
        for n in range(1, 7)
    ]  # fmt: skip
    lines += [{"kind": "eval", "step": n, "heldout_loss": 5.0 - n} for n in (0, 3)]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + '\n{"kind": "step", "st')  # cut by a kill
    return folder


def test_figures_leave_out_steps_that_compiled_and_tell_the_slowest_rank(tmp_path: Path):
    alone = run_figures(steps_session())
    assert alone is not None
    assert alone.step_s is not None
    assert (alone.step_s.median, alone.step_s.num, alone.num_compiled) == (0.5, 4, 1)
    assert (alone.budget_bytes, alone.predicted_bytes) == (40 * MIB, 38 * MIB)
    assert [rank.rank for rank in alone.ranks] == [0]
    run = run_figures(steps_session(), run_folder(tmp_path))
    assert run is not None
    assert run.step_s is not None
    assert (run.step_s.median, run.tokens_per_s) == (0.6, 2e4)
    assert run.curves["loss"] == [6.5, 5.5, 4.5, 3.5, 2.5, 1.5]
    assert run.heldout == {"step": [0, 3], "loss": [5.0, 2.0]}
    waits = {rank.rank: (round(rank.waits_s, 3), round(rank.works_s, 3)) for rank in run.ranks}
    assert waits == {0: (0.1, 0.4), 1: (0.02, 0.48)}
    assert run_figures(small_session()) is None


def test_files_of_a_run_give_numbers_or_nothing(tmp_path: Path):
    (tmp_path / "record-rank1.json").write_text("[" * 100_000)
    hostile = [
        "[1, 2]", "[" * 100_000, '"<script>"', '{"kind": ["step"]}', '{"kind": "step", "step": NaN}',
        '{"kind": "step", "step": 1, "loss": "<img src=x>", "step_time_s": 1e999}',
        '{"kind": "step", "step": 2, "loss": 1' + "0" * 400 + ', "step_time_s": true}',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(hostile))
    session = Session(events=[step(1, 1.0, loss="<b>", graphs=[3], mfu=float("inf"))])
    run = run_figures(session, tmp_path)
    assert run is not None
    assert run.step_s is None
    assert run.curves["step"] == [1, 2]
    assert run.curves["loss"] == run.curves["seconds"] == [None, None]
    (rank,) = run.ranks
    assert rank.step_s.median == 1.0


def test_the_page_begins_with_the_figures_of_the_run(browser, tmp_path: Path):
    session = steps_session()
    session.events.append(
        EventRow(
            kind="PlanCompared",
            at_s=2e9 + 9,
            data={
                "step": 5, "predicted_peak_bytes": 38 * MIB, "measured_peak_bytes": 36 * MIB,
                "predicted_seconds": 0.25, "measured_seconds": 0.5,
            },
        )
    )  # fmt: skip
    page = Page(browser, write_page(session, tmp_path / "a.html", run=run_folder(tmp_path)))
    page.open()
    assert (
        page.js("return document.querySelector('main').firstElementChild.className") == "headline"
    )
    time, tokens, loss, memory = page.texts(".figure")
    assert time.startswith("step time600 ms")
    assert "middle half 600 ms to 600 ms; 5 steps, 1 that compiled left out" in time
    assert "20,000" in tokens
    assert "6.50 → 1.50held-out 5.00 → 2.00" in loss
    assert "36.0 MiB90.0% of 40.0 MiB budget" in memory
    assert page.texts(".figure.bad") == []
    compared = rows(page, "Predicted and measured")
    assert compared["forward and backward"] == ["250 ms", "500 ms", "2.00x"]
    assert compared["peak memory"] == ["38.0 MiB", "36.0 MiB", "0.95x"]
    page.until(lambda: len(page.texts(".curves canvas")) == 3)
    ranks = rows(page, "Ranks")
    assert ranks["1"] == ["500 ms", "500 ms to 500 ms", "480 ms", "20.0 ms"]
    assert "Rank 1 is the slowest: it works 480 ms of a step" in page.texts("main")[0]
    assert page.errors() == []


def test_a_figure_that_is_missing_says_what_records_it(show):
    session = small_session()
    session.rank, session.world_size = 0, 2
    session.events.append(step(1, 0.5))
    page = show(session)
    _, tokens, loss, memory = page.texts(".figure")
    assert "not recorded" in tokens
    assert "gradient_clipping" in tokens
    assert "gradient_clipping" in loss
    assert "not recorded" in memory
    assert set(rows(page, "Predicted and measured")["peak memory"][:2]) == {
        "set compile.memory_budget"
    }
    assert "1 of 2 ranks recorded" in page.texts("main")[0]
    assert page.texts(".curves") == []
    assert "38.0 MiB" in show(planned_session()).texts(".figure strong")
    assert show(small_session()).texts(".headline") == []
