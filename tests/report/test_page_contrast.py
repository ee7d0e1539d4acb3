"""WCAG AA in the real browser: text 4.5 to 1, marks 3 to 1, on every view, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from report.test_page_overview import planned_session
from report.test_page_records import big_session, recompiled_session
from torchloom.records import CacheUse, Session

MEASURE = Path(__file__).with_name("contrast.js").read_text("utf-8")
MIN_TEXT, MIN_MARK = 4.5, 3.0
PARTS = ("guards", "graphs", "passes", "kernels", "code", "bytecode", "recompile", "time")
MARKS = {
    ".lanes .b", ".box > rect", ".frame > rect", ".toggle rect", ".edge", ".key", ".bar-line span",
    "button:not(.plain):not([role=tab]):not(:disabled)", "select", "input",
    "[role=tab][aria-selected=true]", ".break", ".fix", ".card.bad", "--focus", "--i6",
    ".loud", ".stacked .part", ".stacked .limit", ".swatch",
}  # fmt: skip
CLASSES = {
    "tag bad", "tag warn", "tag good", "tag info", "t-k", "t-s", "t-n", "no", "told", "empty",
    "name", "what", "in", "axis", "lane", "u-value", "sub wrap",
}  # fmt: skip
GRAPH = """
%a : f32[4] = placeholder
%b : f32[8] = torchloom.gather(%a, 'layers.0.w.weight')
%c : f32[4] = torchloom.reduce(%b, 'layers.0.w.weight')
%d = torchloom.wait_([%c])
%e : f32[4] = torchloom.offload(%c)
%f : f32[4] = aten.view(%e)
%g : f32[4] = aten.exp(%f)
return (%g,)
"""


def full_session() -> Session:
    """Return a record of a run in which every kind of mark of the page occurs."""
    session = planned_session()
    session.functions[0].skipped = "the recompile limit of 2 is reached: 6 calls ran eagerly"
    session.functions[0].recompile_limit, session.functions[0].num_eager_calls = 2, 6
    first = session.functions[0].entries[0]
    first.passes[0].after = GRAPH
    first.trigger = {"x": "a float32 tensor of shape [10]", "kw": "a `dict`"}
    first.caches += [CacheUse(cache="aot", outcome="hit"), CacheUse(cache="aot", outcome="bypass")]
    first.artifacts[1].text = "# made\ndef call(x):\n    return 'a', 3\n"
    return session


def views(page, session_name: str) -> Iterator[str]:
    """Show one view after the other, with what is hidden at first."""
    if session_name == "full":
        for where in ("overview", "fn/f", "timeline", "events"):
            page.open(where)
            page.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            yield where
        page.open("timeline")
        page.press("Whole run")
        yield "whole run"
        for part in PARTS:
            page.open(f"entry/0-0/{part}")
            page.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            yield part
        page.open("entry/0-0/passes")
        page.press("difference")
        yield "difference"
        page.open("entry/0-0/graphs")
        page.type(".bar input[type=search]", "exp")
        page.until(lambda: page.texts(".line.hit"))
        yield "found line"
        page.js(
            "const s = document.querySelectorAll('.choice select')[1]; s.value = 'p0';"
            "s.dispatchEvent(new Event('change'))"
        )
        page.click("#way-picture")
        yield "picture of kinds"
    elif session_name == "recompiled":
        for where in ("overview", "fn/scale", "entry/0-3/recompile"):
            page.open(where)
            yield where
    else:
        page.open("entry/0-0/graphs")
        page.click("#way-picture")
        yield "groups"
        page.type(".picture input", "layers.1.attention.q7.")
        page.until(lambda: page.texts(".box.found .name"))
        yield "found box"


SESSIONS = {
    "full": full_session,
    "recompiled": lambda: recompiled_session(5),
    "groups": lambda: big_session(2),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(show, theme: str):
    texts: list[list] = []
    marks: list[list] = []
    for name, build in SESSIONS.items():
        page = show(build())
        page.js("localStorage.setItem('torchloom-theme', arguments[0])", theme)
        for view in views(page, name):
            assert page.js("return document.documentElement.dataset.theme") == theme
            found = page.js(MEASURE)
            texts += [[view, *row] for row in found["texts"]]
            marks += [[view, *row] for row in found["marks"]]
        page.js("localStorage.clear()")
    assert [row for row in texts if row[2] < MIN_TEXT] == []
    assert [row for row in marks if row[2] < MIN_MARK] == []
    # Nothing was overlooked: each sort of mark and of text was there to be measured.
    assert MARKS - {row[1] for row in marks} == set()
    met = {row[1].split(".", 1)[1] for row in texts if "." in row[1]}
    assert {each for each in CLASSES if not any(m.startswith(each) for m in met)} == set()
