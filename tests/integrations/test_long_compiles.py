"""A compile that takes long is told of, until its session is gone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

from torchloom.graph import PassContext
from torchloom.integrations.prepare import tell_long_compiles
from torchloom.pipeline import CompileSession
from torchloom.pipeline.report import CompilePhase


def test_a_long_compile_says_what_it_is_busy_with(caplog) -> None:
    session = CompileSession(passes=(), context=PassContext(world_size=1), backend="eager")
    session.report.phase = CompilePhase("plan", "forward", time.monotonic() - 40)
    tell_long_compiles(session, every_s=0.01)
    wait_for(lambda: "compiling: planning forward (40 s)" in caplog.text)
    del session
    gc.collect()
    wait_for(lambda: "torchloom-phases" not in [each.name for each in threading.enumerate()])


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
