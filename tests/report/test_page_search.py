"""What to fix first, search, events in words, times from the start of a step, and two runs compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from report.conftest import Page
from report.sessions import HOSTILE, run_session
from report.test_page_headline import run_folder, steps_session
from report.test_page_overview import rows
from support.commands import invoke
from torchloom.cli.records import diff
from torchloom.records import Break, Entry, Function, Recompile, Session, save_record


def causes_session() -> Session:
    """Return a record of one changed size that three functions met, and of one break at three lines."""
    mark = "compiling f with dynamic=True saves this compile"
    functions = []
    for number, (name, source) in enumerate(
        (("f", "argument x"), ("torch_dynamo_resume_in_f_at_3", "argument y"), ("g", "argument h"))
    ):
        first, second = Entry(compile_id=f"{number}/0"), Entry(compile_id=f"{number}/1")
        first.breaks.append(
            Break(
                reason="print", explanation="", hints=["Remove it."], count=2, gb_type="GB1",
                user_stack=[f"/home/me/f.py:{number + 3} in f"],
            )
        )  # fmt: skip
        fix = f"now dynamic: entry {number}/1 serves sizes >= 2; {mark}"
        second.recompiles.append(
            Recompile(
                entry=first.compile_id, source=source, expected="size(0) == 8", actual="6",
                text="size mismatch", fix=fix,
            )
        )  # fmt: skip
        function = Function(name=name, file="/home/me/f.py", line=3)
        function.entries += [first, second]
        functions.append(function)
    return Session(functions=functions)


def test_one_cause_is_one_thing_to_fix(show):
    page = show(causes_session())
    broken, recompiled = page.texts(".fixes li")
    assert broken.startswith("3 graph breaks print at ")
    assert "f.py:3 in f, f.py:4 in f, f.py:5 in f, met 6 times" in broken
    assert recompiled.startswith("3 recompiles of f: argument x was expected as size(0) == 8")
    assert "argument y of f, from line 3 on, argument h of g" in recompiled
    assert recompiled.endswith("compiling f with dynamic=True saves this compile")


def test_search_finds_entries_graphs_and_events(show):
    page = show(run_session())
    page.js("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))")
    assert page.js("return document.activeElement.id") == "search"
    page.type("#search", "torch.exp(neg)")
    page.until(lambda: page.texts("main h2") == ["Graphs and code: 1"])
    page.click("main td a")
    page.until(lambda: page.js("return document.getElementById('view').dataset.tab") == "entry")
    page.open("search/reduce")
    assert page.texts("main h2") == ["Events: 6"]
    assert "collective" in page.texts("main tbody tr")[0]
    assert page.js("return document.getElementById('search').value") == "reduce"
    page.open("search/nowhere at all")
    assert "Nothing in this record" in page.texts(".empty")[0]
    page.open("search/size mismatch")
    assert "recompile: size mismatch" in page.texts("main tbody tr")[0]


@pytest.fixture
def sides(tmp_path: Path) -> list[Path]:
    """Return the folders of two runs."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, stage, waits_s in zip(folders, (2, 3), (0.1, 0.2), strict=True):
        session = steps_session(waits_s=waits_s)
        save_record(session, folder / "record.json")
        run_folder(folder)
        config = {"zero": {"stage": stage}, "seed": None, "name": HOSTILE[1]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "summary.json").write_text('{"model": "llama-tiny", "checkpoint": "/x"}')
    (folders[1] / "metrics.jsonl").unlink()
    return folders


def test_two_runs_are_compared_on_one_page(browser, sides, tmp_path: Path):
    done = invoke(diff, *sides, "--html", tmp_path / "diff.html")
    assert done.exit_code == 0, done.output
    assert "diff.html" in done.output
    page = Page(browser, tmp_path / "diff.html")
    page.open()
    assert page.texts("h1") == ["one and two"]
    assert page.texts("#tabs button") == []
    figures = rows(page, "Figures")
    assert figures["step time"] == ["600 ms", "500 ms", "0.83x"]
    assert figures["tokens/s"] == ["20,000", "200", "0.01x"]
    assert figures["last held-out loss"] == ["2.00", "not recorded", ""]
    assert rows(page, "What differs in the configuration") == {"zero.stage": ["2", "3"]}
    page.until(lambda: len(page.texts(".curves canvas")) == 3)
    assert "one held-out" in page.texts(".u-legend th")
    assert "two" in page.texts(".u-legend th")
    assert page.js("return document.querySelectorAll('main img').length") == 0
    assert page.errors() == []
