"""How the page is laid out, in a real browser: narrow screens, ticks, dark charts, no idle rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from report.conftest import Page
from report.test_page_overview import planned_session
from report.test_page_records import run_session, small_session
from torchloom.records import PassRun, Session
from torchloom.report.charts import Bar, BarGroup, Series, bar_chart, line_chart

pytestmark = [
    # selenium leaves its connection to the driver to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
TABS = ("overview", "fn", "entry", "timeline", "events")
PARTS = ("guards", "graphs", "passes", "kernels", "code", "bytecode", "recompile", "time")
# Cells, bars and cards that end beyond the screen. Code and graphs scroll in panes of their own.
TOO_WIDE = """
return [...document.querySelectorAll('td, th, dd, .card, .bars > *, .stacked, .empty, .fixes li')]
  .filter((e) => !e.closest('.code, .picture, table.source, .u-legend'))
  .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map((e) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`);
"""


@pytest.fixture
def phone(browser):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def passes_session() -> Session:
    """Return a record in which some passes changed nothing."""
    session = small_session()
    entry = session.functions[0].entries[0]
    for name, graph in (
        ("bucket", "graph0"),
        ("prefetch", "graph0"),
        ("bucket", "graph0.backward"),
    ):
        entry.passes.append(
            PassRun(
                name=name, stage="lowered", graph=graph, num_edits=0, duration_s=0.001, curve=[8]
            )
        )
    return session


@pytest.mark.usefixtures("phone")
def test_a_phone_shows_all_columns(show):
    page = show(planned_session())
    for where in [*TABS, *(f"entry/0-0/{part}" for part in PARTS)]:
        page.open(where)
        page.js("document.querySelectorAll('main details').forEach((d) => { d.open = true; })")
        assert page.js(TOO_WIDE) == [], where


def test_neighbouring_ticks_differ_at_every_zoom(show):
    page = show(run_session())
    for where in ("timeline", "entry/0-0/time"):
        page.open(where)
        page.until(lambda: page.texts(".lanes .axis"))
        for _ in range(16):
            labels = page.texts(".lanes .axis")
            assert len(labels) >= 2, where
            assert len(labels) == len(set(labels)), where
            page.click("[aria-label='Zoom in']")


def test_ticks_of_one_axis_are_in_one_unit_and_do_not_overlap(show):
    page = show(run_session())
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .axis"))
    for _ in range(12):
        units = {re.sub(r"[-\d.,\s]", "", label) for label in page.texts(".lanes .axis")} - {""}
        assert len(units) == 1
        gaps = page.js(
            "const t = [...document.querySelectorAll('.lanes .axis')].map((e) =>"
            " e.getBoundingClientRect()); return t.slice(1).map((r, i) => r.left - t[i].right)"
        )
        assert min(gaps, default=1) > 0
        page.click("[aria-label='Zoom in']")


def test_a_record_without_steps_has_a_timeline_of_its_compiles(show):
    page = show(small_session())
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .b title"))
    assert "compile" in page.texts(".lanes .lane")
    assert any("dynamo of entry 0/0 of f" in text for text in page.texts(".lanes .b title"))
    assert "No training step was recorded" in page.texts("#view")[0]


def test_passes_that_changed_nothing_are_one_line(show):
    page = show(passes_session())
    page.open("entry/0-0/passes")
    assert len(page.texts("table.stack tbody tr")) == 1
    (line,) = page.texts(".unchanged")
    assert line == "2 passes changed nothing: bucket (2 graphs), prefetch."


def test_an_entry_whose_passes_all_changed_nothing_says_so(show):
    session = passes_session()
    entry = session.functions[0].entries[0]
    entry.passes = entry.passes[1:2]
    page = show(session)
    page.open("entry/0-0/passes")
    assert page.texts("table.stack tbody tr") == []
    assert page.texts(".unchanged") == ["1 pass changed nothing: bucket."]


COLOURS = """
const style = (css, name) => {
  const e = document.querySelector(css);
  return e ? getComputedStyle(e)[name] : null;
};
return {bar: style('.lanes .b', 'fill'), axis: style('.lanes .axis', 'fill'),
        tick: style('.lanes .tick', 'stroke'), lane: style('.lanes .lane', 'fill')};
"""


def test_charts_of_the_page_follow_its_theme(show):
    page = show(run_session())
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .b"))
    before = page.js(COLOURS)
    page.click("#theme")
    after = page.js(COLOURS)
    assert None not in before.values()
    assert {name for name in before if before[name] == after[name]} == set()
    page.click("#theme")


def test_svg_charts_follow_the_theme_of_the_system(browser, tmp_path: Path):
    lines = line_chart(
        [Series("loss", [1, 2], [3, 4], has_markers=True)], title="t", x_label="x", y_label="y"
    )
    bars = bar_chart(["a"], [BarGroup("g", [Bar(1, 0.5, 1.5)])], title="t", y_label="y")
    for name, text in (("lines", lines), ("bars", bars)):
        (tmp_path / f"{name}.svg").write_text(text)
        page = Page(browser, tmp_path / f"{name}.svg")
        found = []
        for scheme in ("light", "dark"):
            feature = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
            browser.get(page.path.as_uri())
            found.append(
                page.js(
                    "return [...document.querySelectorAll('rect, text, line, path, circle')].map((e) =>"
                    " [getComputedStyle(e).fill, getComputedStyle(e).stroke].join())"
                )
            )
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        light, dark = found
        assert light[0].startswith("rgb(255, 255, 255)")
        assert all(a != b for a, b in zip(light, dark, strict=True)), name
