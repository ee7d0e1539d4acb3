"""The page in a real browser: every tab, search, groups, themes, narrow screens, hostile text."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from report.test_page_records import (
    HOSTILE,
    big_session,
    hostile_session,
    run_session,
    small_session,
)
from torchloom.records import Session
from torchloom.report.page import write_page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
pytestmark = [
    pytest.mark.skipif(
        not (Path(CHROMIUM).exists() and Path(DRIVER).exists()),
        reason="no Chromium with its driver: apt-get install chromium chromium-driver",
    ),
    # selenium leaves its connection to the driver to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MAX_OPEN_S = 2.0
TABS = ("overview", "fn", "entry", "timeline", "events")
PARTS = ("guards", "graphs", "passes", "kernels", "code", "bytecode", "recompile", "time")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = "headless no-sandbox disable-gpu no-first-run disable-background-networking"
    for flag in f"{flags} disable-component-update disable-sync window-size=1280,900".split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """A page that is open in the browser."""

    def __init__(self, browser, path: Path) -> None:
        self.browser, self.path = browser, path

    def open(self, where: str = "overview") -> float:
        """Open the page and return the seconds until its first view stands."""
        self.browser.get("about:blank")
        start = time.monotonic()
        self.browser.get(f"{self.path.as_uri()}#{where}")
        self.until(lambda: self.js("return document.getElementById('view').dataset.openMs"))
        return time.monotonic() - start

    def js(self, code: str, *args: object):
        return self.browser.execute_script(code, *args)

    def click(self, css: str) -> None:
        self.browser.find_element("css selector", css).click()

    def press(self, name: str) -> None:
        self.browser.find_element("xpath", f"//button[normalize-space()='{name}']").click()

    def texts(self, css: str) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", css
        )

    def type(self, css: str, text: str) -> None:
        box = self.browser.find_element("css selector", css)
        box.clear()
        box.send_keys(text)

    def until(self, holds: Callable[[], object], within_s: float = 10.0) -> None:
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, "the page did not come to the state in time"
            time.sleep(0.02)

    def errors(self) -> list[str]:
        return [row["message"] for row in self.browser.get_log("browser")]


@pytest.fixture
def show(browser, tmp_path: Path) -> Iterator[Callable[[Session], Page]]:
    pages: list[Page] = []

    def build(session: Session) -> Page:
        pages.append(Page(browser, write_page(session, tmp_path / f"{len(pages)}.html")))
        pages[-1].open()
        return pages[-1]

    yield build
    for page in pages:
        assert page.errors() == []


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


def test_guards_about_arguments_come_first_and_can_be_filtered(show):
    page = show(small_session())
    page.open("entry/0-0/guards")
    assert "argument x" in page.texts("table.guards tbody tr")[0]
    page.type("[role=tabpanel] input", "torch")
    page.until(lambda: len(page.texts("table.guards tbody tr")) == 1)


def test_text_search_goes_to_its_lines(show):
    page = show(big_session(4))
    page.open("entry/0-0/graphs")
    page.type(".bar input[type=search]", "layers.3.attention.q79")
    page.until(lambda: page.texts(".line.hit"))
    assert "view1_3_79" in page.texts(".line.hit")[0]
    assert "1 of 1 line" in page.texts("[role=status]")[0]


def test_a_graph_as_a_picture(show):
    page = show(small_session())
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    assert page.texts(".box .name") == ["L_x_", "neg", "y", "output"]
    assert len(page.texts(".edge")) == 3
    page.js("document.querySelectorAll('.box')[2].dispatchEvent(new MouseEvent('click'))")
    detail = page.texts(".node-detail")[0]
    assert "torch.exp" in detail and "f32[10]" in detail and "f.py:2" in detail
    page.type(".picture input", "exp")
    page.until(lambda: page.texts(".box.found .name") == ["y"])
    page.press("Show in the text")
    page.until(lambda: "torch.exp" in "".join(page.texts(".line.hit")))


def test_a_large_graph_begins_closed_and_opens_by_group(show):
    page = show(big_session(30))
    page.open("entry/0-0/graphs")
    start = time.monotonic()
    page.click("#way-picture")
    assert time.monotonic() - start < MAX_OPEN_S
    closed = len(page.texts(".box"))
    assert 1 < closed <= 150
    page.js("document.querySelector('.box.k-group').dispatchEvent(new MouseEvent('dblclick'))")
    assert len(page.texts(".box")) > closed
    page.press("Expand")
    assert closed < len(page.texts(".box")) <= 300
    assert "stay closed" in page.texts(".picture .told")[0]
    page.press("Collapse")
    assert len(page.texts(".box")) <= closed


def test_a_graph_is_walked_by_keyboard(show):
    page = show(big_session(4))
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    closed = len(page.texts(".box"))
    page.browser.find_element("css selector", "svg.graph").send_keys("n")
    assert len(page.texts(".box.chosen")) == 1
    page.browser.find_element("css selector", "svg.graph").send_keys("\ue007")  # enter
    assert len(page.texts(".box")) != closed


def test_passes_show_differences_and_memory(show):
    page = show(small_session())
    page.open("entry/0-0/passes")
    page.until(lambda: page.texts(".uplot canvas"))
    page.press("difference")
    assert page.texts(".line.add")[0].endswith("%z : f32[4] = aten.exp(%x)")
    assert page.texts(".line.cut") == []


def test_the_timeline_shows_lanes_and_zooms(show):
    page = show(run_session())
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .lane") == ["phases", "gather", "reduce"])
    before = page.texts(".lanes rect title")
    page.click("[aria-label='Zoom in']")
    page.click("[aria-label='Zoom in']")
    assert 0 < len(page.texts(".lanes rect title")) < len(before)


def test_what_was_not_recorded_is_said(show):
    page = show(Session())
    for tab in TABS:
        page.open(tab)
        assert page.texts(".empty"), tab


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


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(show, text: str):
    page = show(hostile_session(text))
    for where in [*TABS, *(f"entry/0-0/{part}" for part in PARTS)]:
        page.open(where)
        assert page.js("return document.title") != "owned"
        assert page.js("return document.querySelectorAll('main img, main script').length") == 0


def test_a_large_record_opens_soon(show):
    page = show(big_session(30))
    assert page.open() < MAX_OPEN_S
