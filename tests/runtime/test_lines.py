"""Ranks that do not answer, and compilations that nobody waits for any more."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict

import pytest

from torchloom.errors import PeerLostError
from torchloom.position import POSITION, Verdict
from torchloom.runtime.lines import breaking
from torchloom.runtime.lines.judge import judge
from torchloom.runtime.lines.report import Limits, Report, Waiting, silent_report


def waiting(for_s: float) -> Report:
    wait = Waiting(event="c:1", what="gather of a", ranks=[0, 1], for_s=for_s)
    return Report(rank=0, step=4, waiting=wait, limits=Limits(step_s=3.0))


def test_a_rank_that_does_not_answer_is_waited_for_up_to_the_limit() -> None:
    early, late = waiting(2.0), waiting(3.5)
    assert judge({0: early, 1: silent_report(1, [early])}, {}) is None
    found = judge({0: late, 1: silent_report(1, [late])}, {})
    assert found is not None
    assert "rank 1 did not come within 3 s" in found.text
    assert "it does not answer (it was stopped" in found.text
    assert "timeouts.step_s" in found.text


def test_a_report_survives_the_line() -> None:
    report = waiting(1.0)
    assert Report.from_plain(asdict(report)) == report
    silent = silent_report(1, [report])
    assert Report.from_plain(asdict(silent)) == silent


@pytest.fixture
def no_handler():
    before = signal.signal(signal.SIGURG, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGURG, before)
    POSITION.verdict = None


def test_a_compilation_that_sleeps_is_interrupted(no_handler) -> None:
    breaking.let_compilations_be_interrupted()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 is gone"), POSITION.doing("compiling graph0"):
        POSITION.verdict = Verdict("lost", "rank 1 is gone")
        breaking.interrupt_compilation()
        time.sleep(5)
    assert time.monotonic() - started < 3


def test_nothing_but_a_compilation_is_interrupted(no_handler) -> None:
    breaking.let_compilations_be_interrupted()
    POSITION.verdict = Verdict("lost", "rank 1 is gone")
    breaking.interrupt_compilation()
    with POSITION.doing("saving"):
        breaking.interrupt_compilation()


def test_a_handler_of_the_program_stays(no_handler) -> None:
    seen = []
    signal.signal(signal.SIGURG, lambda *_: seen.append(1))
    breaking.let_compilations_be_interrupted()
    with POSITION.doing("compiling graph0"):
        POSITION.verdict = Verdict("lost", "rank 1 is gone")
        breaking.interrupt_compilation()
    assert seen == []
