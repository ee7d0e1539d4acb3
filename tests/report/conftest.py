"""A real browser for the tests of the page, and pages that are open in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.browser import browser as browser
from torchloom.records import Session
from torchloom.report.page import write_page


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Selenium leaves its connection to the driver to the garbage collector."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{warning}"))


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

    def until(self, holds: Callable[[], object], within_s: float = 120.0) -> None:
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
