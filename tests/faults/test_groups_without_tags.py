"""Backends that match collectives by order alone (NCCL): ranks that differ are told a step later.

gloo stands in for such a backend: its own collectives are used, whose messages carry no names.
"""

from __future__ import annotations

import time

import pytest
import torch

import torchloom
from faults.test_different_programs import Here, another_layer, another_order, batch, branches
from support.ranks import run_ranks
from torchloom.errors import AgreementError, PeerLostError
from torchloom.runtime import transports
from torchloom.runtime.channel import CHANNELS
from torchloom.runtime.transports.c10d import C10dCollectives


def without_tags(monkeypatch) -> None:
    def made(group, channel):
        channel.has_tags = False
        return C10dCollectives(group, channel)

    monkeypatch.setattr(transports, "GlooCollectives", made)


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("program", [another_layer, another_order], ids=lambda p: p.__name__)
def test_ranks_that_differ_are_told_before_the_next_step_ends(
    program, backend: str, monkeypatch
) -> None:
    without_tags(monkeypatch)

    def fn(rank):
        here = Here(rank, backend=backend)
        here.finish = lambda note="": None  # the program goes on, until it is told
        try:
            program(here)
            for _ in range(600):
                here.step()
                time.sleep(0.1)
        except (AgreementError, PeerLostError) as error:
            return str(error)
        return ""

    for text in run_ranks(2, fn):
        assert "did not begin the same collectives" in text or "waits for" in text


def test_ranks_that_agree_are_not_disturbed(monkeypatch) -> None:
    without_tags(monkeypatch)

    def fn(rank):
        model = torchloom.shard_model(branches(), persistence_threshold=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(batch(rank)).backward()
            torchloom.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.5)
        return len({each.rolling for each in CHANNELS.values() if not each.has_tags})

    assert run_ranks(2, fn) == [1, 1]
