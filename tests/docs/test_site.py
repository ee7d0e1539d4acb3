"""The site builds without a warning, and its reference holds every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchloom
from support.pages import DOCS

MODULES = ("config", "custom_ops", "report", "records", "inspect", "compiler")
"""Rooms whose whole `__all__` is documented."""
INTEGRATIONS = ("accelerate", "transformers")
ELSEWHERE = {
    "inspect.Watch",
    "inspect.LiveEntry",
    "compiler.COMPILE_CONFIG",
    "compiler.COMPILE_CONFIG_KEY",
}
ROOMS = {"backends", "compiler", "config", "inspect", "records", "report", "serve", "shard"}
"""Names of the root that are rooms: their names are documented one by one."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site with warnings as errors."""
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "sphinx_design"):
        pytest.importorskip(name, reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_builds_without_a_warning(site) -> None:
    page = (site / "reference" / "training.html").read_text()
    assert 'id="torchloom.initialize"' in page
    assert "Shard a model and return" in page


def test_no_page_is_wider_than_a_phone(site, browser) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for page in sorted(site.rglob("*.html")):
        if "_static" not in page.parts:
            browser.get(page.as_uri())
            width = browser.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, page.name


def documented() -> set[str]:
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^\.\. auto\w+:: torchloom\.([\w.]+)", text, re.MULTILINE))


def test_the_reference_holds_every_public_name() -> None:
    told = documented()
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for name in set(torchloom.__all__) - ROOMS:
        is_error = name.endswith("Error")  # by automodule
        assert name in told or is_error or f"`torchloom.{name}`" in text, name
    for room in MODULES:
        for name in importlib.import_module(f"torchloom.{room}").__all__:
            whole = f"{room}.{name}"
            assert whole in told or name in told or whole in ELSEWHERE, whole


@pytest.mark.parametrize("room", INTEGRATIONS)
def test_the_reference_holds_every_integration(room) -> None:
    path = f"src/torchloom/integrations/{room}"
    files = [DOCS.parent / f"{path}.py", DOCS.parent / path / "__init__.py"]
    text = next(file for file in files if file.exists()).read_text()
    names = re.findall(r'"(\w+)"', text.rpartition("__all__ = [")[2])
    assert names
    for name in names:
        assert f"integrations.{room}.{name}" in documented()
