"""What is published: a source distribution of the whole repository, a wheel of the package, and a page of an index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as b; print(b.{}('{}'))"
CACHES = ("src/torchloom/__pycache__/x.pyc", "docs/_build/html/x.html", "bench/out/x.json")
MADE = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The archives, made as `python -m build` makes them: the wheel from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("built")
    for name in tracked:
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "checkout" / name)
    for name in CACHES:
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "checkout" / name).write_text("")
    sdist = folder / build("build_sdist", folder, folder / "checkout")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    return sdist, folder / build("build_wheel", folder, unpacked)


def build(hook: str, to: Path, source: Path) -> str:
    argv = [sys.executable, "-c", BUILD.format(hook, to)]
    ended = subprocess.run(argv, cwd=source, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr
    return ended.stdout.splitlines()[-1]


def test_the_source_distribution_holds_the_repository(built, tracked):
    with tarfile.open(built[0]) as archive:
        files = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
    assert {name for name in files if ".egg-info/" not in name} == {*tracked, *MADE}


def test_the_wheel_holds_the_package(built, tracked):
    with zipfile.ZipFile(built[1]) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == {name[4:] for name in tracked if name.startswith("src/")}


def test_an_index_page_has_links_that_work(built, tracked):
    with zipfile.ZipFile(built[1]) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        page = Parser().parsestr(archive.read(name).decode())
    assert page["Description-Content-Type"] == "text/markdown"
    assert (
        f'__version__ = "{page["Version"]}"\n' in (ROOT / "src/torchloom/__init__.py").read_text()
    )
    assert page["License-Expression"] == "Apache-2.0"
    urls = dict(line.split(", ") for line in page.get_all("Project-URL"))
    assert {"Documentation", "Source", "Issues", "Changelog"} <= urls.keys()
    text, readme = page.get_payload(), (ROOT / "README.md").read_text()
    code = re.compile("^```.*?^```", re.M | re.S)
    assert code.findall(text) == code.findall(readme)
    links = re.findall(r'(?:\]\(|(?:src|srcset|href)=")([^)"]+)', code.sub("", text))
    assert links and all(link.startswith(("https://", "#")) for link in links)
    ours = [link for link in links if link.startswith(urls["Source"] + "/")]
    for link in ours:
        kind, ref, path = re.fullmatch(rf"{urls['Source']}/(\w+)/([\w.]+)/([^#]+).*", link).groups()
        assert ref == ("main" if "dev" in page["Version"] else f"v{page['Version']}")
        assert (kind == "raw") == path.endswith((".png", ".svg", ".gif"))
        assert path in tracked or any(name.startswith(path + "/") for name in tracked), path


def test_hooks_run_the_ruff_of_the_checks():
    hooks, pins = (
        (ROOT / name).read_text() for name in (".pre-commit-config.yaml", "constraints.txt")
    )
    [rev] = re.findall(r"/ruff-pre-commit\n    rev: v(\S+)", hooks)
    assert f"ruff=={rev}\n" in pins


def test_addresses_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    known = re.findall(r'^(?:Source|Documentation) = "(.+)"', project, re.M)
    for name in (
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "SECURITY.md",
        ".github/ISSUE_TEMPLATE/config.yml",
    ):
        found = re.findall(r"https://[^)\s]*torchloom[^)\s]*", (ROOT / name).read_text())
        assert found and all(link.startswith(tuple(known)) for link in found), name
