"""Copies between a device and the host: whole however late they are, over page-locked memory on a GPU."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from support.gpu import late_mover, on_gpu_too
from torchloom.errors import MoveError
from torchloom.runtime.host import HostArena, mover_of

NUMELS = (1, 7, 4096, 100_003)


def wanted(index: int, device: str) -> torch.Tensor:
    return torch.arange(NUMELS[index % 4], device=device) * (index + 1.0)


@on_gpu_too
@pytest.mark.parametrize("is_late", [False, True])
def test_copies_are_whole_while_memory_is_given_away_and_taken(device, is_late, monkeypatch):
    """Sources are overwritten, and host memory is taken again, as soon as a copy was waited for."""
    mover = late_mover(device, monkeypatch) if is_late else mover_of(torch.device(device))
    load = torch.randn(512, 512, device=device)
    away, back = deque(), []

    def fetch() -> None:
        index, hosts = away.popleft()
        results = mover.begin_reload(hosts)
        mover.wait(results)
        back.append((index, results[0]))

    for index in range(24):
        source = wanted(index, device)
        hosts = mover.begin_offload([source])
        load = (load @ load).tanh()
        mover.wait(hosts)
        source.fill_(torch.nan)
        away.append((index, hosts))
        del source, hosts
        if len(away) == 3:
            fetch()
    while away:
        fetch()
    assert [index for index, _ in back] == [*range(24)]
    for index, found in back:
        assert torch.equal(found, wanted(index, device)), index
    assert torch.isfinite(load).all()


@on_gpu_too
def test_host_memory_stands_where_tensors_of_the_device_do(device):
    arena = HostArena(torch.device(device, 0) if device == "cuda" else torch.device(device))
    values = torch.arange(1000.0, device=device)
    seen = arena.device_like(values)
    assert seen.device == values.device
    seen.copy_(values)
    seen.mul_(2)
    if device == "cuda":
        assert arena.empty(8, torch.float32).is_pinned()
        torch.cuda.synchronize()
    assert torch.equal(arena.host_alias(seen), 2 * torch.arange(1000.0))
    assert arena.owns(seen) and not arena.owns(values)


def test_whole_segments_are_page_locked_once(monkeypatch):
    locked, codes = [], [0, 0, 712]

    def register(address, size, flags):
        locked.append((address, size))
        return codes.pop(0)

    cudart = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    arena = HostArena(torch.device("cuda", 0), segment_bytes=1 << 16)
    held = [arena.empty(1000, torch.float32) for _ in range(20)]
    assert [size for _, size in locked] == [1 << 16] * 2
    starts = [address for address, _ in locked]
    assert all(any(0 <= each.data_ptr() - at < 1 << 16 for at in starts) for each in held)
    arena.empty(1 << 20, torch.uint8, pin=False)
    assert len(locked) == 2
    with pytest.raises(MoveError, match=r"refused to page-lock 131072 bytes .*error 712"):
        arena.empty(1 << 17, torch.uint8)
