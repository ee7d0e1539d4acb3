"""Fixtures that every room's tests share: ranks, golden files, small models."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # no test downloads, and none starts a thread that tells of it
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden files anew")


@pytest.hookimpl(tryfirst=True)  # before those are left out that `-m` leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of sweeps that `make test-all` runs beyond `make test`."""
    from sweeps import mark_sweeps

    unknown = mark_sweeps(items)
    if unknown and not any("::" in each for each in config.args):
        raise pytest.UsageError(f"tests/sweeps.py names cases that no test has: {unknown}")


def pytest_collection_finish() -> None:
    """Let processes that tests fork run backward, also under a CUDA build of torch.

    The first fake mode of a CUDA build that finds no device pretends that there are eight, and the first
    backward of a process starts a thread for each device; a process with such threads cannot fork children
    that run backward (torch 2.11-2.15: `ensureCUDADeviceGuardSet`, `start_device_threads`). So the first
    backward is this one, before any fake mode.
    """
    if "torch" in sys.modules:  # some folders need none, and importing it takes seconds
        import torch

        torch.ones((), requires_grad=True).backward()


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


@pytest.fixture(autouse=True, scope="session")
def _end_of_pool() -> Iterator[None]:
    """End the ranks that tests have shared in this process."""
    yield
    if pool := sys.modules.get("support.pool"):
        pool.close()
