"""A compile that takes long says in the log what it is busy with."""

from __future__ import annotations

import threading
import time

import torch

from torchloom.graph import PassContext
from torchloom.pipeline import CompileSession


def test_a_long_compile_says_what_it_is_busy_with(caplog) -> None:
    def slow(gm, example_inputs):
        session.tell_phase("plan", "graph0")
        time.sleep(0.2)
        return gm.forward

    session = CompileSession(passes=(), context=PassContext(world_size=1), backend=slow)
    torch.compile(torch.sin, backend=session)(torch.ones(2))
    assert "compiling" not in caplog.text
    torch.compiler.reset()
    session.tell_phases_every_s = 0.02
    num_threads = threading.active_count()
    torch.compile(torch.sin, backend=session)(torch.ones(2))
    assert "compiling: planning graph0 (0 s)" in caplog.text
    time.sleep(0.1)
    assert threading.active_count() == num_threads
