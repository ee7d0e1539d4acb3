"""Warm-ups run on the stream of recordings, between two waits."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from torchloom._torch.cuda_graphs import Pool


def test_a_warm_up_waits_for_the_current_stream_which_waits_for_it(monkeypatch) -> None:
    log = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream):
        log.append(f"on {getattr(stream, 'name', stream)}")
        yield

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    pool = Pool(torch.device("cuda", 0))
    with pool.beside():
        log.append("runs")
    wanted = ["on cuda:0", "cuda:0 waits for main", "on cuda:0", "runs", "main waits for cuda:0"]
    assert log == wanted
    with pytest.raises(ValueError, match="fails"), pool.beside():
        raise ValueError("fails")
    assert log[-1] == "main waits for cuda:0"
