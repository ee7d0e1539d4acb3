"""Ranks that cannot meet: wrong variables, a taken port, a rank that never comes, a mesh that does
not fit. One sentence each, within the limit."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchloom
from support.models import tricky
from support.ports import free_port
from support.ranks import run_ranks
from support.runs import settings
from torchloom import envs
from torchloom.errors import ConfigError, PeerLostError, TorchloomError
from torchloom.launch import rendezvous
from torchloom.launch.groups import ensure_process_group, make_world

FORK = multiprocessing.get_context("fork")
NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
    "SLURM_NTASKS", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip

SOON_S = 100.0
"""Far less than any limit that would have been waited for, far more than a loaded machine needs."""


@pytest.fixture
def port() -> int:
    return free_port()


def meet_in_child(environment: dict[str, object], limit_s: float, answers) -> None:
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in environment.items()})
    started = time.monotonic()
    try:
        ensure_process_group(rendezvous_s=limit_s)
        said = f"{dist.get_rank()} of {dist.get_world_size()}"
        dist.barrier()
    except TorchloomError as error:
        said = f"{type(error).__name__}: {error}"
    answers.put((environment["RANK"], said, time.monotonic() - started))
    answers.close()
    answers.join_thread()
    time.sleep(0 if "Error" in said else 1)  # a store that went at once would be one more fault
    os._exit(0)


def meet(*environments: dict[str, object], limit_s: float = 20.0) -> list[tuple]:
    """Let each environment's process look for the others; return what each came to."""
    answers = FORK.Queue()
    children = [
        FORK.Process(target=meet_in_child, args=(environment, limit_s, answers), daemon=True)
        for environment in environments
    ]
    for child in children:
        child.start()
    try:
        found = [answers.get(timeout=300) for _ in children]
    finally:
        for child in children:
            child.kill()
            child.join()
    return sorted(found, key=lambda each: str(each[0]))


def rank(number: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, object]:
    return {"RANK": number, "WORLD_SIZE": size, "MASTER_ADDR": host, "MASTER_PORT": port}


def test_ranks_meet(port: int) -> None:
    found = meet(*(rank(number, 3, port) for number in (2, 1, 0)))
    assert [said for _, said, _ in found] == ["0 of 3", "1 of 3", "2 of 3"]


def meet_twice(rank: int, lingering_s: float, port: int) -> tuple[int, int]:
    """Leave a group and make the next one at once; rank 0 serves the store of the first a while longer."""
    dist.destroy_process_group()  # that of the test
    os.environ["MASTER_PORT"] = str(port)
    sums = []
    for turn in range(3):
        ensure_process_group(rendezvous_s=20.0)
        found = torch.ones(1) * (rank + turn)
        dist.all_reduce(found)
        sums.append(int(found))
        dist.barrier()
        if rank == 0:
            time.sleep(lingering_s)
        dist.destroy_process_group()
    return tuple(sums)


@pytest.mark.parametrize("lingering_s", [0.0, 0.7])
def test_ranks_that_meet_again_while_the_store_of_before_is_still_served(
    port: int, lingering_s: float
) -> None:
    assert run_ranks(3, meet_twice, lingering_s, port) == [(3, 6, 9)] * 3


@pytest.mark.parametrize("number", [0, 1])
def test_a_store_of_the_launcher_that_goes_is_a_lost_peer(
    port: int, number: int, monkeypatch
) -> None:
    served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    reached = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    del served
    monkeypatch.setattr(rendezvous, "_open", lambda *args, **rest: reached)
    monkeypatch.setattr(rendezvous, "_MEETINGS", itertools.count())  # forked ranks count on from it
    place = envs.Meeting("127.0.0.1", port, is_hosted=True, attempt=0)
    with pytest.raises(PeerLostError, match=f"rank {number} lost the store"):
        rendezvous.meet(envs.Launch(number, number, 2), place, 5.0)


def test_a_rank_that_never_comes_is_named(port: int) -> None:
    for _, said, _ in meet(rank(0, 3, port), rank(2, 3, port), limit_s=2.0):
        assert "PeerLostError: ranks [1] of 3" in said


def test_rank_0_never_comes(port: int) -> None:
    ((_, said, _),) = meet(rank(1, 2, port), limit_s=2.0)
    assert "could not reach rank 0" in said
    assert f"127.0.0.1:{port}" in said


def test_a_taken_port_is_told_by_rank_0() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = meet(rank(0, 2, number), rank(1, 2, number), limit_s=2.0)
    assert found[0][1].startswith(f"ConfigError: rank 0 cannot open port {number}")
    assert "MASTER_PORT" in found[1][1]


def test_an_address_that_does_not_resolve(port: int) -> None:
    found = meet(rank(0, 2, port, "no.such.host.invalid"), rank(1, 2, port, "no.such.host.invalid"))
    for _, said, _ in found:
        assert "ConfigError: MASTER_ADDR='no.such.host.invalid'" in said


def test_two_processes_with_one_rank(port: int) -> None:
    found = meet(rank(0, 3, port), rank(1, 3, port), rank(1, 3, port), limit_s=600.0)
    assert all("ConfigError: two processes are rank 1" in said for _, said, _ in found)
    assert all(seconds < SOON_S for *_, seconds in found), "nobody waits for what cannot come"


def test_ranks_that_count_differently(port: int) -> None:
    found = meet(rank(0, 2, port), rank(1, 3, port), limit_s=600.0)
    for _, said, seconds in found:
        assert "rank 1 was told that there are 3 ranks, rank 0 that there are 2" in said
        assert seconds < SOON_S


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": 2}, "RANK=2 is out of range for WORLD_SIZE=2"),
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None, "RANK": 1}, "RANK=1 is out of range for WORLD_SIZE (not set)=1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
    ],
)
def test_wrong_variables(monkeypatch, change, words: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    values = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_555}
    for name, value in {**values, **change}.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))
    with pytest.raises((ConfigError, PeerLostError)) as caught:
        torchloom.initialize(model=tricky(), config=settings())
    assert isinstance(caught.value, ConfigError), caught.value
    assert words in str(caught.value)


def test_slurm_and_mpi_are_checked_by_their_own_names(monkeypatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "5")
    with pytest.raises(ConfigError, match=r"SLURM_PROCID=5 .* SLURM_NTASKS=2"):
        envs.launch()


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_meshes_that_do_not_fit() -> None:
    def fn(rank):

        everyone = init_device_mesh("cpu", (4,))
        meshes = [
            (everyone.get_group(), None),
            ("cpu", None),
            (init_device_mesh("cpu", (1, 2, 2)), None),
            (DeviceMesh("cpu", [0, 1]), None),
            (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], None),
            (init_device_mesh("cpu", (2, 2)), 4),
        ]
        said = [refusal(make_world, mesh, shard_size) for mesh, shard_size in meshes]
        said.append(refusal(torchloom.initialize, model=tricky(), config=settings(), mesh=(2, 2)))
        said.append(refusal(make_world, None, 3))
        assert make_world(init_device_mesh("cpu", (2, 2)), 2).world_size == 4
        return said

    wanted = [
        "not ProcessGroup", "not str", "3 axes", "the first [0, 1], but the process group has 4",
        "but the process group has 4", "shard_size=4 contradicts", "not tuple", "does not divide",
    ]  # fmt: skip
    for said in run_ranks(4, fn):
        for words, each in zip(wanted, said, strict=True):
            assert words in each
