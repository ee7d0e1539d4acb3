"""Draw the first screen of a report in both themes, for README and docs.

    python tools/report_pictures.py [RUN] [--out docs/_static]

RUN is the folder of a run with a record; without it, a small run on two ranks is made first. Needs Chromium with its
driver, and selenium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

from torchloom.cli.records import find_record
from torchloom.records import load_record
from torchloom.report.page import write_page

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 1280, 750
MAX_BYTES = 250_000
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "compile": {"enabled": True, "memory_budget": "64MiB"},
}


def main() -> None:
    """Write `report-light.png` and `report-dark.png`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "_static")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = asked.run or small_run(Path(scratch))
        record = load_record(find_record(run))
        page = write_page(record, Path(scratch) / "report.html", run=run)
        for theme in ("light", "dark"):
            path = asked.out / f"report-{theme}.png"
            draw(page, path, theme)
            print(f"{path} ({path.stat().st_size // 1000} KB)")


def small_run(folder: Path) -> Path:
    """Train a small decoder on two ranks under a memory budget; return the folder of the run."""
    config, out = folder / "config.json", folder / "run"
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "torchloom", "train", "--report", "--steps", "60"]
    command += ["--nproc", "2", "--seq-len", "128", "--eval-every", "20"]
    subprocess.run([*command, "--config", config, "--out", out], check=True)
    return out


def draw(page: Path, path: Path, theme: str) -> None:
    """Write what the first screen of a page shows in a theme as PNG."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    driver = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=driver)
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        browser.get(page.resolve().as_uri())
        browser.implicitly_wait(10)
        browser.find_element("css selector", ".curves canvas")
        path.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(path))
    finally:
        browser.quit()
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has more than {MAX_BYTES // 1000} KB: crop it, or draw less")


if __name__ == "__main__":
    main()
