"""A verdict that comes just when the main thread does not wait yet: the wait that follows ends all the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from torchloom._torch.distributed import default_store
from torchloom.errors import AgreementError
from torchloom.position import POSITION, Verdict
from torchloom.runtime import get_communicator, lines

VERDICT = Verdict("differ", "the ranks run different programs")


def tell_this_rank() -> None:
    """Hand the verdict over as the thread of the line does."""
    line = lines._LINES.line
    assert line is not None
    line._settle(*VERDICT)


def test_between_the_messages_and_the_wait_for_them() -> None:
    def fn(rank: int) -> None:
        comm = get_communicator(dist.group.WORLD)
        comm.sum_(torch.ones(1), "first")
        if rank == 0:
            default_store().wait(["judged"])  # alive, and not to come
            return
        shard = torch.ones(2)
        fulls = comm.begin_gather([shard], torch.float32, ["weight"])
        tell_this_rank()
        with pytest.raises(AgreementError, match="different programs"):
            comm.wait(fulls)
        default_store().set("judged", "")

    run_ranks(2, fn)


def test_before_a_collective_of_torchs_own() -> None:
    def fn(rank: int) -> None:
        get_communicator(dist.group.WORLD).sum_(torch.ones(1), "first")
        if rank == 0:
            default_store().wait(["judged"])
            return
        tell_this_rank()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3))
        assert POSITION.verdict == VERDICT
        default_store().set("judged", "")

    run_ranks(2, fn)
