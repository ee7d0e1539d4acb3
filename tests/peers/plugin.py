"""A pytest plugin: DeepSpeed's distributed tests on forked gloo ranks, and why each test ended as it did."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import torchloom
from peers import package
from peers.cpu_accelerator import Cpu
from peers.missing import NoCounterpartError
from support.ranks import run_ranks
from torchloom.errors import EngineAttributeError, TorchloomError

OUTCOMES = ("passed", "failed", "missing", "refused", "skipped", "hung")
_INTERNALS = ("_Refuses", "peers.missing", "ZeroParamStatus")
"""What failed comparisons show that ask for DeepSpeed's own classes."""
_MARK = re.compile(r"@@(\w+)@@ (.*)")


class Ended(NamedTuple):
    """One test: its id, one of `OUTCOMES`, and why."""

    test: str
    outcome: str
    why: str


class HungError(Exception):
    """A test did not end in time."""


def outcome_of(error: BaseException) -> str:
    """Return what an error of a test tells of torchloom.

    `missing`: the map or the engine has no such name. `refused`: torchloom says in one sentence that it does not do this.
    """
    if isinstance(error, (HungError, TimeoutError)):
        return "hung"
    text = str(error)
    is_missing = isinstance(error, (NoCounterpartError, EngineAttributeError)) or (
        isinstance(error, AttributeError) and "has no attribute" in text
    )
    if is_missing or any(each in text for each in _INTERNALS):
        return "missing"
    return "refused" if isinstance(error, TorchloomError) else "failed"


class Plugin:
    """Runs tests on ranks of this machine and keeps how they ended.

    Args:
        timeout_s: of one test.
        sample: the number of cases to keep of each test function; 0 keeps all.
        keep: called with each test's end.
    """

    def __init__(self, timeout_s: float, sample: int, keep: Callable[[Ended], None]) -> None:
        self._timeout_s, self._sample, self._keep = timeout_s, sample, keep

    def pytest_configure(self, config: pytest.Config) -> None:
        from unit import common

        common.DistributedExec._launch_with_file_store = _launcher(self._timeout_s)
        common.DistributedFixture.__test__ = False

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Make fixtures of the classes that DeepSpeed runs as such, which pytest no longer takes for fixtures."""
        if not isinstance(collector, pytest.Module):
            return
        from unit.common import DistributedFixture

        for name, each in list(vars(collector.obj).items()):
            is_class = isinstance(each, type) and issubclass(each, DistributedFixture)
            if is_class and each is not DistributedFixture:
                setattr(collector.obj, name, _fixture(name, each))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._sample:
            return
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        items[:] = [
            each[index * len(each) // min(self._sample, len(each))]
            for each in cases.values()
            for index in range(min(self._sample, len(each)))
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Limit the time of tests that run in this process as well."""

        def stop(*_: object) -> None:
            raise HungError(f"not done within {self._timeout_s:.0f} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(int(self._timeout_s) + 30)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            outcome, why = report.outcome, ""
            if report.skipped:
                outcome, why = "skipped", str(report.longrepr[-1] if report.longrepr else "")
            elif call.excinfo is not None:
                found = _MARK.search(str(call.excinfo.value))
                error = call.excinfo.value
                outcome, why = found.groups() if found else (outcome_of(error), _line(error))
            if report.when != "teardown":
                self._keep(Ended(item.nodeid, outcome, why))
        return report


def _fixture(name: str, cls: Any) -> Any:
    @pytest.fixture(name=name)
    def made(request: pytest.FixtureRequest) -> None:
        cls()(request)

    return made


def _launcher(timeout_s: float) -> Callable[..., None]:
    """Return what takes the place of DeepSpeed's launch of one test's ranks."""

    def launch(test: Any, request: pytest.FixtureRequest, world_size: Any) -> None:
        for num_ranks in [world_size] if isinstance(world_size, int) else world_size:
            skipped = run_ranks(num_ranks, _on_rank, test, timeout_s=timeout_s)
            if any(skipped) and not Cpu.has_half:  # a test of that precision alone
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(Cpu, "has_half", True)
                    skipped = run_ranks(num_ranks, _on_rank, test, timeout_s=timeout_s)
            if any(skipped):
                pytest.skip(next(filter(None, skipped)))

    return launch


def _on_rank(rank: int, test: Any) -> str:
    """Run a test on one rank; return why it was skipped."""
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    if not test.init_distributed:
        torch.distributed.destroy_process_group()
    try:
        test.run(**test._fixture_kwargs)
    except pytest.skip.Exception as skip:
        return skip.msg or "skipped"
    except BaseException as error:
        traceback.print_exc()
        raise AssertionError(f"@@{outcome_of(error)}@@ {_line(error)}") from error
    return ""


def _line(error: BaseException) -> str:
    lines = [each for each in str(error).splitlines() if each.strip()]
    places = traceback.extract_tb(error.__traceback__)
    where = next((f"{e.name}:{e.lineno}" for e in reversed(places) if "/unit/" in e.filename), "")
    return f"{type(error).__name__}: {' '.join(each.strip() for each in lines[:2])[:300]} ({where})"


def _raises(plain: Any, expected: Any, *args: Any, match: Any = None, **named: Any) -> Any:
    """Expect an error of DeepSpeed's, or torchloom's refusal of the same, whose class and words differ."""
    kinds = expected if isinstance(expected, tuple) else (expected,)

    def is_either(error: BaseException) -> bool:
        return (
            isinstance(error, TorchloomError) or match is None or bool(re.search(match, str(error)))
        )

    return plain((*kinds, TorchloomError), *args, check=is_either, **named)


def prepare_torch() -> None:
    """Let tests wrap models on the CPU by DDP, and scale losses, as they do on devices; and import the map."""
    package.install()
    assert torchloom.initialize  # imported here, not in each rank
    torch.ones((), requires_grad=True).backward()  # or forked ranks cannot (tests/conftest.py)
    plain = torch.nn.parallel.DistributedDataParallel

    class OnCpu(plain):
        def __init__(
            self, module: Any, device_ids: Any = None, output_device: Any = None, **named: Any
        ) -> None:
            super().__init__(module, **named)

    torch.nn.parallel.DistributedDataParallel = OnCpu
    sys.modules.setdefault("hjson", json)
    pytest.raises = functools.partial(_raises, pytest.raises)
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
