"""Compilations that nobody waits for any more are interrupted."""

from __future__ import annotations

import signal
import time

import pytest

from torchloom.errors import PeerLostError
from torchloom.position import POSITION, Verdict
from torchloom.runtime.lines import line


@pytest.fixture
def no_handler():
    before = signal.signal(signal.SIGURG, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGURG, before)
    POSITION.verdict = None


def test_a_compilation_that_sleeps_is_interrupted(no_handler) -> None:
    line.let_compilations_be_interrupted()
    with pytest.raises(PeerLostError, match="rank 1 is gone"), POSITION.doing("compiling graph0"):
        POSITION.verdict = Verdict("lost", "rank 1 is gone")
        line.interrupt_compilation()
        time.sleep(60)


def test_nothing_but_a_compilation_is_interrupted(no_handler) -> None:
    line.let_compilations_be_interrupted()
    POSITION.verdict = Verdict("lost", "rank 1 is gone")
    line.interrupt_compilation()
    with POSITION.doing("saving"):
        line.interrupt_compilation()


def test_a_handler_of_the_program_stays(no_handler) -> None:
    seen = []
    signal.signal(signal.SIGURG, lambda *_: seen.append(1))
    line.let_compilations_be_interrupted()
    with POSITION.doing("compiling graph0"):
        POSITION.verdict = Verdict("lost", "rank 1 is gone")
        line.interrupt_compilation()
    assert seen == []
