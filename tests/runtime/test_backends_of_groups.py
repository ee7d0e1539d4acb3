"""Which transport a group gets, by its backend and whether there are GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.traffic import W, channel
from torchloom.loop import clip
from torchloom.position import POSITION
from torchloom.runtime.base import GroupRef, carried_by_gloo
from torchloom.runtime.lines import line
from torchloom.runtime.transports import c10d, connect, gloo


@pytest.mark.parametrize(
    ("backend", "has_gpu", "expected"),
    [
        ("gloo", False, True),
        ("gloo", True, True),
        ("nccl", True, False),
        ("cpu:gloo,cuda:nccl", True, False),
        ("cpu:gloo,cuda:nccl", False, True),
        ("cpu:gloo", True, True),
    ],
)
def test_gloo_carries_what_no_gpu_computes(backend, has_gpu, expected, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert carried_by_gloo(object()) is expected


def test_a_group_for_both_kinds_of_devices_gets_the_transport_of_gpus() -> None:
    """Also where memory of the host is asked for, which GPUs do not share."""

    def fn(rank: int) -> list[str]:
        group = GroupRef(dist.group.WORLD)
        found = [type(connect(group, "before", symmetric_memory=False))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
            patch.setattr(torch.cuda, "is_available", lambda: True)
            found += [
                type(connect(group, f"with GPUs {shared}", symmetric_memory=shared))
                for shared in (False, True)
            ]
        return [each.__name__ for each in found]

    expected = [gloo.GlooCollectives.__name__, *[c10d.C10dCollectives.__name__] * 2]
    assert run_ranks(2, fn) == [expected] * 2


def test_a_group_whose_maker_named_no_backend_has_those_of_the_devices(monkeypatch) -> None:
    def fn(rank: int) -> list[bool]:
        dist.destroy_process_group()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        found = [carried_by_gloo(dist.group.WORLD)]
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return [*found, carried_by_gloo(dist.group.WORLD)]

    assert run_ranks(1, fn) == [[True, False]]


def test_gloo_takes_tensors_of_gpus_through_host_memory(monkeypatch) -> None:
    """Every tensor counts as one of a GPU, and none that gloo is given is the caller's."""

    def fn(rank: int) -> None:
        shards = [torch.arange(n) + 10.0 * rank for n in (3, 0, 70_000)]
        fulls = [shard.new_empty(2 * shard.numel()) for shard in shards]
        mine = {t.untyped_storage().data_ptr() for t in (*shards, *fulls)}
        given = set()
        for name in ("send", "recv"):
            original = getattr(dist.ProcessGroup, name)

            def noting(group, tensors, *rest, original=original):
                given.update(t.untyped_storage().data_ptr() for t in tensors)
                return original(group, tensors, *rest)

            monkeypatch.setattr(dist.ProcessGroup, name, noting)
        monkeypatch.setattr(gloo, "_is_far", lambda tensor: True)
        transport = gloo.GlooCollectives(GroupRef(dist.group.WORLD), channel())
        transport.all_gather(shards, fulls, W).finish()
        sums = [torch.empty_like(shard) for shard in shards]
        transport.reduce_scatter(fulls, sums, 0.5, W).finish()
        assert given and not given & mine
        for shard, full, each in zip(shards, fulls, sums, strict=True):
            whole = torch.arange(shard.numel()) + 0.0
            assert torch.equal(full, torch.cat([whole, whole + 10]))
            assert torch.equal(each, full.view(2, -1)[rank])

    # `.cpu()` of a tensor that is there already is that tensor.
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    run_ranks(2, fn)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_a_verdict_aborts_what_a_device_waits_for_once(backend, monkeypatch) -> None:
    """NCCL's kernels hold up the device, whose results the main thread asks for outside of any wait."""
    aborted = []
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(POSITION, "on_verdict", [])
    on_gpu = SimpleNamespace(abort=lambda: aborted.append("cuda"))

    class Group:
        _device_types = (torch.device("cpu"), torch.device("cuda"))
        _get_backend = staticmethod(lambda device: {"cuda": on_gpu}[device.type])
        size, rank = staticmethod(lambda: 2), staticmethod(lambda: 0)

    group = Group()
    line.end_waits_with_verdict(GroupRef(group))
    for _ in range(3):  # a line looks four times a second
        for end_wait in list(POSITION.on_verdict):
            end_wait()
    assert aborted == ([] if backend == "gloo" else ["cuda"])


@pytest.mark.parametrize(
    ("backend", "expected"), [("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("gloo", "cpu")]
)
def test_a_rank_without_gradients_sums_where_the_others_do(backend, expected, monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    comm = SimpleNamespace(world_size=2, shard_group=object)
    assert clip._device_of([], comm).type == expected
