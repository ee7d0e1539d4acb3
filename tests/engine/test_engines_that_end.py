"""An engine that is destroyed, or dropped with its model, gives its memory back."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import torchloom
from support.pool import run_ranks
from support.runs import settings

WIDTH = 384
ENGINE_BYTES = 4 * 2 * WIDTH * WIDTH * 4
"""Weights, gradients and two moments of one model."""


class Broken(nn.Module):
    """Two graphs: the functions around the break are Dynamo's own, or the class's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x.relu())


def whole():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def settle() -> None:
    for _ in range(3):  # what one round deletes may hold what the next one finds
        gc.collect()


def live_bytes() -> int:
    settle()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    real = [each for each in tensors if not isinstance(each, FakeTensor) and each.is_cpu]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in real}.values())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("make", [whole, Broken])
@pytest.mark.parametrize("ends", ["destroyed", "dropped", "kept"])
@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_engines_one_after_another(make, ends, backend) -> None:
    check(make, ends, backend, num=20 if (make, ends) == (whole, "destroyed") else 4)


def check(make, ends, backend, num) -> None:
    def fn(rank):
        seen, kept = [], []
        for index in range(num):
            model = make()
            engine = torchloom.initialize(model=model, config=settings(3))[0]
            if backend:
                engine.compile(backend=backend)
            for _ in range(2):
                engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
                engine.step()
            alive = [weakref.ref(each) for each in (engine, engine.optimizer)]
            if ends == "kept":  # the model serves on, by itself
                engine.destroy()
                kept.append(model.eval())
            if ends == "destroyed":
                engine.destroy()
            del engine, model
            if index in (1, num - 1):  # what the first one imports is not its own
                seen.append((live_bytes(), resident_bytes()))
                assert [ref() for ref in alive] == [None, None]
        return seen

    for seen in run_ranks(2, fn):
        live, resident = (after - before for before, after in zip(*seen, strict=True))
        held = ENGINE_BYTES // 8 if ends == "kept" else 0  # this rank's shards of the weights
        assert live <= (num - 2) * (held * 1.1 + 4096)
        if num > 10 and not backend:  # compilers keep caches of their own, about 1 MB a model
            assert resident < num * ENGINE_BYTES / 4
