"""Time collectives between the ranks of this run, by size.

Up to three transports are timed: torchloom's over messages (`all_gather`), torchloom's over shared
memory if the ranks can share it (`shm_all_gather`), and, for comparison, the process group's
(`c10d_all_gather`). Compiled steps use the first two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchloom import envs
from torchloom._torch.distributed import all_gather_single, reduce_scatter_single
from torchloom.engine.groups import ensure_process_group
from torchloom.runtime import Communicator, get_communicator

SIZES = tuple(1 << power for power in range(10, 27, 2))
"""Sizes of the whole tensor in bytes: 1 KiB to 64 MiB."""
_QUICK_SIZES = (1 << 10, 1 << 16)

Collective = Callable[[Tensor, Tensor], object]


def join_ranks(device: torch.device) -> None:
    """Create the process group; on CUDA each rank takes the device of its local rank."""
    if device.type == "cuda":
        torch.cuda.set_device(envs.launch().local_rank)
    ensure_process_group()


def measure_collectives(
    device: torch.device, quick: bool = False
) -> dict[str, list[tuple[int, float]]]:
    """Time each collective over the default process group; all ranks must call.

    Args:
        device: where the tensors are.
        quick: time two small sizes only.

    Returns:
        (bytes, median microseconds) by kind and number of ranks, e.g. `"all_gather/2"`.
    """
    world_size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None, "there are ranks"
    found: dict[str, list[tuple[int, float]]] = {}
    for kind, collective in _collectives(group, device).items():
        points = []
        for size in _QUICK_SIZES if quick else SIZES:
            numel = -(-size // 4 // world_size) * world_size  # every rank has an equal part
            whole = torch.randn(numel, device=device)
            part = torch.randn(numel // world_size, device=device)
            points.append((4 * numel, _median_us(collective, whole, part)))
        found[f"{kind}/{world_size}"] = points
    return found


def _collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, Collective]:
    """Return collectives of a whole tensor and this rank's part of it, by kind."""
    found = {
        **_of_torchloom(get_communicator(group)),
        "c10d_all_gather": all_gather_single,
        "c10d_reduce_scatter": lambda whole, part: reduce_scatter_single(part, whole),
        "c10d_all_reduce": lambda whole, part: dist.all_reduce(whole),
    }
    if device.type == "cpu":
        shared = get_communicator(group, symmetric_memory=True)
        if shared.shares_memory:
            found |= {f"shm_{kind}": call for kind, call in _of_torchloom(shared).items()}
    return found


def _of_torchloom(comm: Communicator) -> dict[str, Collective]:
    f32 = torch.float32

    def all_gather(whole: Tensor, part: Tensor) -> None:
        comm.wait(comm.begin_gather([part], f32, ("probe",)))

    def reduce_scatter(whole: Tensor, part: Tensor) -> None:
        comm.wait(comm.begin_reduce([whole], [part.numel()], f32, f32, ("probe",)))

    def all_reduce(whole: Tensor, part: Tensor) -> None:
        comm.wait(comm.begin_sync([whole], f32, f32, ("probe",)))

    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def _median_us(collective: Collective, whole: Tensor, part: Tensor) -> float:
    """Time a collective; the number of repeats depends on the size alone, equal on all ranks."""
    repeats = max(3, min(21, (8 << 20) // (whole.numel() * 4)))
    samples = []
    for index in range(repeats + 1):
        dist.barrier()
        _wait(whole)
        started = time.perf_counter()
        collective(whole, part)
        _wait(whole)
        if index:  # the first one opens connections
            samples.append(1e6 * (time.perf_counter() - started))
    return statistics.median(samples)


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
