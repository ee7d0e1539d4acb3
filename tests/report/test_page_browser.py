"""The page in a real browser: every tab, search, groups, themes, narrow screens, hostile text."""

from __future__ import annotations

from pathlib import Path

import pytest

from report.conftest import Page
from report.sessions import (
    HOSTILE,
    big_session,
    hostile_session,
    run_session,
    small_session,
)
from torchloom.events import ProgramReady, Recorder, emit
from torchloom.records import EventRow, Session
from torchloom.records.summary import summary
from torchloom.report.charts import Bar, BarGroup, Series, bar_chart, line_chart

MAX_OPEN_S = 2.0
TABS = ("overview", "fn", "entry", "timeline", "events")
PARTS = ("guards", "graphs", "passes", "kernels", "code", "bytecode", "recompile", "time")


def test_every_tab_opens(show):
    page = show(small_session())
    for tab in TABS:
        page.click(f"#tabs-{tab}")
        page.until(
            lambda tab=tab: page.js("return document.getElementById('view').dataset.tab") == tab
        )
        assert len(page.js("return document.getElementById('view').textContent")) > 20
    page.open("entry/0-0")
    for part in PARTS:
        page.click(f"#sub-{part}")
        assert page.js("return location.hash").endswith(f"entry/0-0/{part}")
        assert len(page.texts("[role=tabpanel]")[0]) > 10


def test_overview_says_what_to_fix_and_links_to_it(show):
    page = show(small_session())
    fixes = page.texts(".fixes li")
    assert "Data-dependent branching" in fixes[0]
    assert "torch.cond" in fixes[0]
    assert "mark_dynamic" in fixes[1]
    page.click(".fixes a")
    page.until(lambda: page.texts("table.source"))
    assert page.texts("tr.cut td.no") == ["3"]
    assert page.js("return document.querySelector('.break a[target]').rel") == "noopener noreferrer"


def test_guards_about_arguments_come_first_and_are_found_by_search(show):
    page = show(small_session())
    page.open("entry/0-0/guards")
    assert "argument x" in page.texts("table.guards tbody tr")[0]
    page.type("#search", "global torch")
    page.until(lambda: page.texts("main h2") == ["Guards: 1"])
    page.open("entry/0-0/guards")
    assert len(page.texts("table.guards tbody tr")) == 2


def test_passes_show_differences_and_memory(show):
    page = show(small_session())
    page.open("entry/0-0/passes")
    page.until(lambda: page.texts(".uplot canvas"))
    page.press("difference")
    assert page.texts(".line.add")[0].endswith("%z : f32[4] = aten.exp(%x)")
    assert page.texts(".line.cut") == []


def test_what_was_not_recorded_is_said(show):
    page = show(Session())
    for tab in TABS:
        page.open(tab)
        assert page.texts(".empty"), tab


def test_programs_for_ranges_of_sizes_say_on_what_they_rely(show):
    with Recorder() as heard:
        emit(
            ProgramReady(
                model="mine.<b>Decoder</b>",
                origin="built",
                key="0f3c",
                contract="Contract(ids: int64[batch, 5]; batch 1..64)",
                seconds=12.5,
                boxes=("batch 1 to 3", "batch 4 to 64"),
                num_calls=(1, 4),
                num_graphs=3,
                verdicts=tuple(
                    f"batch 4 to 64: holds for every size: guard {i}" for i in range(45)
                ),
            )
        )
    rows = [
        EventRow(kind="ProgramReady", at_s=event.at_s, data=event.to_dict())
        for event in heard.events
    ]
    page = show(Session(events=rows))
    assert page.texts(".program h3") == ["mine.<b>Decoder</b>"]
    assert "built in 12.5 s: 2 programs of 3 different graphs" in page.texts(".program .told")[0]
    assert page.texts(".program td") == ["batch 1 to 3", "1", "batch 4 to 64", "4"]
    page.click(".program summary")
    listed = page.texts(".program li")
    assert listed[0] == "batch 4 to 64: holds for every size: guard 0"
    assert listed[-1] == "and 5 more in the record"
    assert not page.errors()
    text = summary(Session(events=rows))
    assert "2 programs built in 12.5 s (batch 1 to 3; batch 4 to 64), 3 graphs" in text


def test_tabs_move_by_arrow_keys(show):
    page = show(small_session())
    tab = page.browser.find_element("css selector", "#tabs-overview")
    tab.send_keys("\ue014")  # right
    page.until(lambda: page.js("return document.activeElement.id") == "tabs-fn")
    page.browser.switch_to.active_element.send_keys("\ue010")  # end
    page.until(lambda: page.js("return document.getElementById('view').dataset.tab") == "events")


def test_the_theme_is_toggled(show):
    page = show(small_session())
    paper = "return getComputedStyle(document.body).backgroundColor"
    before = page.js(paper)
    page.click("#theme")
    assert page.js(paper) != before
    assert page.js("return document.getElementById('theme').ariaPressed") in {"true", "false"}
    page.click("#theme")
    assert page.js(paper) == before


@pytest.mark.parametrize("width", [390, 1280])
def test_no_view_scrolls_sideways(show, width: int):
    page = show(run_session())
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for where in [*TABS, *(f"entry/0-0/{part}" for part in PARTS)]:
            page.open(where)
            wide = page.js("return document.documentElement.scrollWidth")
            assert wide <= width, where
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_hostile_text_stays_text(show):
    page = show(hostile_session(" ".join(HOSTILE)))
    page.type("#search", HOSTILE[0][:8])
    page.until(lambda: page.texts("main tbody tr"))
    for where in [*TABS, *(f"entry/0-0/{part}" for part in PARTS)]:
        page.open(where)
        assert page.js("return document.title") != "owned"
        assert page.js("return document.querySelectorAll('main img, main script').length") == 0


def test_a_large_record_opens_soon(show):
    page = show(big_session(30))
    assert page.open() < MAX_OPEN_S


def test_a_record_without_steps_has_a_timeline_of_its_compiles(show):
    page = show(small_session())
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .b title"))
    assert "compile" in page.texts(".lanes .lane")
    assert any("dynamo of entry 0/0 of f" in text for text in page.texts(".lanes .b title"))
    assert "No training step was recorded" in page.texts("#view")[0]


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
