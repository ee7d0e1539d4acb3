"""Tests that a GPU runs as well: marks, devices to run on, a process group of one rank, copies that are late.

`pytest -m gpu` runs what needs a GPU, in one process; each body has a sibling that runs on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchloom.runtime.host import Mover, mover, mover_of

_MARKS: list[Any] = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_gpu_too = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_MARKS)])
"""Runs a test on a CPU, and on a GPU where there is one."""


def gpu(test: Any) -> Any:
    """Run a test where there is a GPU."""
    for mark in _MARKS:
        test = mark(test)
    return test


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Be the only rank of a process group of the device's backend, inside a `with` block."""
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def late_mover(device: str, monkeypatch: pytest.MonkeyPatch) -> Mover:
    """Return the device's mover; each copy begins milliseconds after it was asked for."""
    found = mover_of(torch.device(device))
    copy_all = mover.copy_all

    def late(pairs: Any) -> None:
        time.sleep(0.002)
        copy_all(pairs)

    monkeypatch.setattr(mover, "copy_all", late)
    for engine in found.engines.values() if device == "cuda" else ():
        monkeypatch.setattr(engine, "begin", _late_on_stream(engine))
    return found


def _late_on_stream(engine: Any) -> Any:
    begin = engine.begin

    def late(pairs: Any) -> Any:
        with torch.cuda.stream(engine._stream):
            torch.cuda._sleep(5_000_000)
        return begin(pairs)

    return late
