"""A real browser for tests of pages: import the fixture into a conftest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

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
