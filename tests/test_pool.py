"""Ranks that tests share: what they report, what they forget, that they are replaced and end."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import pool
from support.runs import make_engine, train
from torchloom.engine import loader
from torchloom.plan import Planner
from torchloom.position import POSITION


class Pair:
    """A class at the top of a test's module."""

    def __init__(self, left: int) -> None:
        self.left = left


def pids(rank: int) -> int:
    return os.getpid()


def test_a_closure_takes_what_it_holds_along() -> None:
    scale = torch.arange(3.0)

    class Local(Pair):
        def __init__(self, left: int) -> None:
            super().__init__(left)
            self.right = 2

    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    def fn(rank: int, power: int):
        total = scale**power
        dist.all_reduce(total)
        return total.tolist(), Local(rank).left, Local(1).right, factorial(4), Pair(7)

    for rank, (total, left, right, product, pair) in enumerate(pool.run_ranks(2, fn, 2)):
        assert (total, left, right, product) == ([0.0, 2.0, 8.0], rank, 2, 24)
        assert type(pair) is Pair


def test_a_world_of_one_takes_the_first_of_the_ranks() -> None:
    def fn(rank: int) -> tuple[int, float]:
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        return os.getpid(), total.item()

    two = pool.run_ranks(2, fn)
    assert [total for _, total in two] == [3.0] * 2
    assert pool.run_ranks(1, fn) == [(two[0][0], 1.0)]
    assert pool.run_ranks(2, fn) == two


def test_a_failure_is_told_with_its_lines_and_values_and_the_ranks_are_replaced() -> None:
    before = pool.run_ranks(2, pids)

    def fn(rank: int) -> None:
        print("was here")
        if rank == 1:
            seven = 7
            assert seven == 8
        dist.barrier()

    with pytest.raises(
        AssertionError, match=r"rank 1\nTraceback(.|\n)*test_pool.py(.|\n)*assert 7 == 8"
    ):
        pool.run_ranks(2, fn)
    assert not set(before) & set(pool.run_ranks(2, pids))


@pytest.mark.exhaustive  # starts ranks twice
def test_a_rank_that_hangs_or_dies_is_told() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not finish within 1 s"):
        pool.run_ranks(2, lambda rank: time.sleep(30 * rank), timeout_s=1.0)
    with pytest.raises(AssertionError, match="rank 0 died without a word"):
        pool.run_ranks(2, lambda rank: time.sleep(30) if rank else os._exit(3))


def test_what_cannot_be_sent_is_told() -> None:
    stream = sys.stdout
    with pytest.raises(TypeError, match=r"support\.ranks\.run_ranks"):
        pool.run_ranks(2, lambda rank: stream.name)


def test_each_function_meets_the_state_of_a_new_process(tmp_path) -> None:
    def leave(rank: int) -> str:
        engine, _ = make_engine()
        engine.compile(backend="aot_eager")
        train(engine, rank, 1)
        torch.manual_seed(3)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.cache_size_limit = 3
        os.environ["LEFT"] = "1"
        os.chdir(tmp_path)
        warnings.simplefilter("ignore")
        POSITION.notes["left"] = "1"
        Planner.would_change = lambda self: True  # type: ignore[method-assign]
        loader.make_loader = None  # type: ignore[assignment]
        return state(rank)

    def state(rank: int) -> str:
        from torchloom.engine import state as engine_state
        from torchloom.runtime import communicators

        facts = [
            torch.rand(()).item(),
            torch._dynamo.config.cache_size_limit,
            os.environ.get("LEFT"),
        ]
        facts += [
            str(Path.cwd()),
            warnings.filters[0][0],
            POSITION.step,
            POSITION.notes,
            engine_state._SERIALS,
        ]
        facts += [Planner.would_change.__qualname__, bool(loader.make_loader)]
        # Part of the keys of torch's caches.
        facts += [torch.backends.cuda.matmul.fp32_precision]
        facts += [torch.backends.mkldnn.matmul.fp32_precision]
        facts += [[*communicators._COMMUNICATORS], dict(torch._dynamo.utils.counters)]
        return repr(facts)

    pool.close()
    new, found = pool.run_ranks(2, state), pool.run_ranks(2, pids)
    left = pool.run_ranks(2, leave)
    assert left[0] != new[0]
    assert left[1] != new[1]
    assert pool.run_ranks(2, state) == new
    assert pool.run_ranks(2, pids) == found


def test_variables_and_folder_of_the_test_are_the_ranks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "1")
    monkeypatch.chdir(tmp_path)
    found = pool.run_ranks(2, lambda rank: (os.environ["OF_THE_TEST"], str(Path.cwd())))
    assert found == [("1", str(tmp_path))] * 2
