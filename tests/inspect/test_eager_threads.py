"""Calls that ran eagerly are counted whichever thread made them, and whether or not it still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import torchloom

X = torch.ones(2)


def scaled(x, n):
    return x + len(n)


def over_its_limit() -> Callable[..., torch.Tensor]:
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(X, "a"), compiled(X, "bb")
    return compiled


def test_threads_that_run_at_the_same_time() -> None:
    compiled = over_its_limit()
    gate = threading.Barrier(5)

    def work() -> None:
        gate.wait()
        for _ in range(50):
            compiled(X, "ccc")

    with torchloom.watch() as w, ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work) for _ in range(4)]
        gate.wait()
        for each in done:
            each.result()
    assert w.record.num_eager_calls == 200


def test_a_thread_that_still_runs_when_the_watch_ends() -> None:
    compiled = over_its_limit()
    called, done = threading.Event(), threading.Event()

    def work() -> None:
        compiled(X, "ccc")
        called.set()
        done.wait()

    thread = threading.Thread(target=work)
    with torchloom.watch() as w:
        thread.start()
        called.wait()
    done.set()
    thread.join()
    assert w.record.num_eager_calls == 1


def test_a_compile_that_has_begun_when_the_watch_ends_is_no_eager_call(monkeypatch) -> None:
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(X, "a")
    begun, done = threading.Event(), threading.Event()
    from torch._dynamo import convert_frame

    before = convert_frame.ConvertFrameAssert.__call__

    def waits(*args: object, **kwargs: object) -> object:
        begun.set()
        done.wait()
        return before(*args, **kwargs)

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", waits)
    thread = threading.Thread(target=lambda: compiled(X, "bb"))
    with torchloom.watch() as w:
        thread.start()
        begun.wait()
    done.set()
    thread.join()
    assert w.record.num_eager_calls == 0
