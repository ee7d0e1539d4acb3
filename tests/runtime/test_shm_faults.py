"""Shared memory that cannot be had, ranks that end or do not come, and what is left behind."""

from __future__ import annotations

import gc
import logging
import os
import resource
import subprocess

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.shm import files_left, mapped_bytes, open_descriptors
from support.traffic import channel
from torchloom.errors import PeerLostError, ShardError
from torchloom.runtime import get_communicator, lines
from torchloom.runtime.base import GroupRef
from torchloom.runtime.transports import shm
from torchloom.runtime.transports.gloo import GlooCollectives
from torchloom.runtime.transports.shm import arena


def sum_of_ranks(comm) -> float:
    means = comm.begin_sync(
        [torch.full((3,), comm.rank + 1.0)], torch.float32, torch.float32, ("w",)
    )
    comm.wait(means)
    return means[0][0].item() * comm.world_size


def error_of(run) -> str:
    try:
        run()
    except PeerLostError as error:
        return str(error)
    raise AssertionError("nothing was missed")


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("torchloom").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def another_host(rank):
    if rank == 1:
        real = arena.Peer.me
        arena.Peer.me = staticmethod(lambda: real()._replace(host="elsewhere"))


def no_access(rank):
    if rank == 1:
        arena.os = type("os", (), {**vars(os), "open": staticmethod(refuse)})


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def little_memory(rank):
    arena.free_bytes = lambda: 5 << 20


def file_limit(rank):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    ("hinder", "words"),
    [
        (another_host, "the ranks run on 2 hosts or containers"),
        (no_access, "rank 1 cannot map the memory of rank 0: Permission denied"),
        (little_memory, "MiB of memory are needed, only 5 MiB are free"),
        (file_limit, "MiB of memory could not be made: File too large"),
    ],
)
def test_falls_back_to_gloo_on_all_ranks_and_says_why_once(hinder, words) -> None:
    def fn(rank):
        heard = Heard()
        hinder(rank)
        comm = get_communicator(dist.group.WORLD, symmetric_memory=True)
        total = sum_of_ranks(comm)
        return isinstance(comm.shard, GlooCollectives), total, heard.lines, mapped_bytes()

    results = run_ranks(2, fn)
    assert [r[:2] for r in results] == [(True, 3.0)] * 2
    (line,) = results[0][2]
    assert words in line
    assert "over gloo instead" in line
    assert results[1][2] == []
    assert [r[3] for r in results] == [0, 0]


def test_nine_ranks_fall_back() -> None:
    def fn(rank):
        heard = Heard()
        comm = get_communicator(dist.group.WORLD, symmetric_memory=True)
        return sum_of_ranks(comm), heard.lines

    results = run_ranks(9, fn)
    assert [total for total, _ in results] == pytest.approx([45.0] * 9)
    assert "9 ranks share their weights, at most 8 can" in results[0][1][0]


def test_a_mark_that_does_not_match_is_not_mapped() -> None:
    def fn(rank):
        if rank == 1:
            real = arena._map
            arena._map = lambda owner, made, *rest, **kw: real(
                owner, {**made, "mark": "0" * 64}, *rest, **kw
            )
        try:
            shm.connect(GroupRef(dist.group.WORLD), channel())
        except shm.UnavailableError as error:
            return str(error)
        return ""

    assert all("is another file" in text for text in run_ranks(2, fn))


def test_a_killed_rank_is_noticed_by_the_others_and_leaves_nothing() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD, symmetric_memory=True)
        sum_of_ranks(comm)
        if rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {os.getpid()}"])
            return None
        text = error_of(lambda: sum_of_ranks(comm))
        assert error_of(lambda: sum_of_ranks(comm)) == text  # and from now on at once
        dist.destroy_process_group()
        gc.collect()
        left = [name for name in open_descriptors() if "memfd" in name]
        return text, left, mapped_bytes(), files_left()

    results = run_ranks(3, fn)
    for text, descriptors, mapped, files in (results[0], results[2]):
        assert "rank 1 has ended" in text
        assert "has ended" in text
        assert (descriptors, mapped, files) == ([], 0, [])


def test_a_rank_that_does_not_come_is_named() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD, symmetric_memory=True)
        comm.shard.link.timeout_s = 0.3
        lines._VERDICT_S = 0.5
        if rank == 2:
            return ""
        return error_of(lambda: sum_of_ranks(comm))

    assert all("rank 2 (process" in text for text in run_ranks(3, fn)[:2])


def test_the_memory_goes_with_the_group() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD, symmetric_memory=True)
        sum_of_ranks(comm)
        during = mapped_bytes()
        dist.destroy_process_group()
        gc.collect()
        with pytest.raises(ShardError, match="has been destroyed"):
            sum_of_ranks(comm)
        return during > 0, mapped_bytes()

    assert run_ranks(2, fn) == [(True, 0)] * 2
