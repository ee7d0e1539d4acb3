"""Ranks that raise, are killed, stop or end early."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from faults.matrix.programs.rank import Rank
from torchloom.runtime import Communicator

_STEP = 3


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        ctx.is_bad = is_bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.is_bad:
            raise ValueError("bad backward")
        return grads[0], None


def raises(rank: Rank) -> None:
    """Rank 1 raises an error of its own."""
    engine, where = rank.start(), rank.arguments["where"]
    who = rank.arguments.get("who", 1)
    for index in range(8):
        is_bad = index == _STEP and rank.rank == who
        if is_bad:
            rank.mark()
        x = rank.batch(index)
        if is_bad and where == "shape":
            x = x[:, 1:]
        if is_bad and where == "forward":
            rank.model.layers[1].register_forward_pre_hook(_fail)
        if where == "backward":
            x = _BadBackward.apply(x.requires_grad_(), is_bad)
        engine.backward(engine(x))
        if is_bad and where == "step":
            engine.optimizer.step = _fail
        engine.step()
    rank.finish()


def _fail(*args: Any, **kwargs: Any) -> None:
    raise ValueError("bad data")


class _Data(IterableDataset):
    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(8):
            if index == _STEP and self.rank.rank == 1:
                self.rank.mark()
                raise ValueError("bad sample")
            yield self.rank.batch(index)


def raises_in_the_loader(rank: Rank) -> None:
    engine = rank.start()
    data = DataLoader(_Data(rank), batch_size=None, num_workers=rank.arguments["workers"])
    for x in data:
        engine.backward(engine(x))
        engine.step()
    rank.finish()


def ends(rank: Rank) -> None:
    """A rank ends in one of many ways, before or after the collectives of a step."""
    rank.start()
    how, when = rank.arguments["how"], rank.arguments.get("when", "before")
    who = rank.arguments.get("who", 1)
    for index in range(8):
        is_it = index == _STEP and rank.rank == who
        if is_it and when == "before":
            rank.mark()
            _END[how]()
        if when == "inside":
            _end_inside(rank, is_it, is_near=index == _STEP, end=_END[how])
        rank.step(index)
        if is_it and when == "after":
            rank.mark()
            _END[how]()
    rank.finish()


def _end_inside(rank: Rank, is_it: bool, is_near: bool, end: Any) -> None:
    """End a rank while it waits for another one, which comes to the same a second later."""
    if is_it:
        threading.Timer(1.0, lambda: (rank.mark(), end())).start()
    elif is_near:
        time.sleep(2.0)


def ends_among_owners(rank: Rank) -> None:
    """Rank 1 is killed when it is about to begin an exchange of owners, or when it has begun it."""
    rank.start()
    begin = Communicator.begin_exchange

    def begin_or_end(comm: Communicator, sent: Any, numels: Any, what: str, names: Any) -> Any:
        is_it = index == _STEP and rank.rank == 1 and what == rank.arguments["what"]
        if is_it and rank.arguments["when"] == "before":
            rank.mark()
            _END["kill"]()
        begun = begin(comm, sent, numels, what, names)
        if is_it:
            rank.mark()
            _END["kill"]()
        return begun

    Communicator.begin_exchange = begin_or_end  # type: ignore[method-assign]
    for index in range(8):
        rank.step(index)
    rank.finish()


def ends_at_any_moment(rank: Rank) -> None:
    """A rank is killed by a thread while it trains, at a moment that falls anywhere in a step."""
    rank.start()
    rank.step()
    if rank.rank == rank.arguments["who"]:
        seconds = rank.arguments["seconds"]
        threading.Timer(seconds, lambda: (rank.mark(), _END["kill"]())).start()
    for index in range(1, 1_000_000):
        rank.step(index)


def ends_while_others_compile(rank: Rank) -> None:
    """One rank is killed at the start of a compilation that takes the others a minute."""

    def slow(gm: Any, example_inputs: Any) -> Any:
        if rank.rank == rank.arguments["who"]:
            time.sleep(1)
            rank.mark()
            _END["kill"]()
        time.sleep(60)
        return gm

    rank.start(slow)
    rank.step()


def runs_out_of_data(rank: Rank) -> None:
    """Rank 1 has fewer batches, and then ends its program or saves."""
    rank.start()
    for index in range(8 if rank.rank == 0 else _STEP):
        rank.step(index)
    rank.mark()
    if rank.arguments["saves"]:
        rank.engine.save_checkpoint(rank.folder)


def trains_on(rank: Rank) -> None:
    """Train until something happens from outside."""
    rank.start()
    for index in range(1_000_000):
        if index == _STEP and rank.rank == 0:
            rank.mark("ready")
        rank.step(index)
        time.sleep(0.01)


def compiles_on(rank: Rank) -> None:
    """Rank 1 compiles for a minute, while something happens from outside."""

    def slow(gm: Any, example_inputs: Any) -> Any:
        if rank.rank == 1:
            rank.mark("ready")
            for _ in range(600):
                time.sleep(0.1)
        return gm

    rank.start(slow)
    rank.step()


_END = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "sys.exit 5": lambda: sys.exit(5),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
