"""Which transport a group gets, by its backend and whether there are GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from torchloom.runtime.base import GroupRef, carried_by_gloo
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
    def fn(rank: int) -> list[str]:
        group = GroupRef(dist.group.WORLD)
        found = [type(connect(group, "before", symmetric_memory=False))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
            patch.setattr(torch.cuda, "is_available", lambda: True)
            found.append(type(connect(group, "with GPUs", symmetric_memory=False)))
        return [each.__name__ for each in found]

    expected = [gloo.GlooCollectives.__name__, c10d.C10dCollectives.__name__]
    assert run_ranks(2, fn) == [expected] * 2
