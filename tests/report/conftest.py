"""A real browser for the tests of the page, and pages that are open in it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchloom.records import Session
from torchloom.report.page import write_page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()):
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
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
