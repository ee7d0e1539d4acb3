"""Fixtures that every room's tests share: ranks, golden files, small models."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden files anew")


@pytest.fixture(autouse=True, scope="session")
def own_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sign stores of tests with a key of the tests' own; children of tests know it too."""
    path = tmp_path_factory.mktemp("key") / "store.key"
    os.environ["TORCHLOOM_KEY_FILE"] = str(path)
    return path


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with `tests/golden/<name>.expected`; `--accept` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.expected"
        if request.config.getoption("--accept"):
            path.write_text(text)
            return
        assert path.exists(), f"no golden file {path.name}: run pytest --accept and review it"
        assert text == path.read_text(), f"{path.name} differs: review, then pytest --accept"

    return check


@pytest.fixture
def run_ranks():
    """Run a function on several ranks, each a forked process with a gloo group of its own."""
    from support.ranks import run_ranks as run

    return run
