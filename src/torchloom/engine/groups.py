"""Process groups: who takes part, on which device, over which axes."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchloom import envs
from torchloom.engine.loopback import is_loopback, join_store, serve_store, stay_local
from torchloom.errors import ConfigError
from torchloom.runtime import Communicator, get_communicator


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    comm: Communicator


def ensure_process_group(port: int = 29500, timeout: timedelta | None = None) -> bool:
    """Make the default process group unless there is one; return whether it was made here.

    NCCL when CUDA is there, else gloo. A process that no launcher started becomes a world of one. What listens
    is on loopback there, and where MASTER_ADDR is of this host alone.

    Args:
        port: rendezvous port on this host, for a world of one.
        timeout: how long a collective may take.

    Raises:
        ConfigError: the launcher's variables are incomplete.
    """
    if dist.is_initialized():
        return False
    launch = envs.launch()
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if launch.world_size == 1 and not envs.is_launched():
        stay_local()
        store = serve_store(world_size=1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        _destroy_at_exit(backend)
        return True
    host = envs.get_str("MASTER_ADDR", "")
    if not host:
        raise ConfigError(
            f"this is rank {launch.rank} of {launch.world_size}, but MASTER_ADDR is not set: start "
            "the processes with torchrun, or set MASTER_ADDR and MASTER_PORT on every rank"
        )
    envs.set_default("MASTER_PORT", str(port))
    envs.set_default("RANK", str(launch.rank))
    envs.set_default("WORLD_SIZE", str(launch.world_size))
    if is_loopback(host):
        stay_local()
    if is_loopback(host) and not envs.is_agents_store():
        store = join_store(host, envs.get_int("MASTER_PORT", port), launch.rank, launch.world_size)
        if timeout is not None:
            store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    else:
        dist.init_process_group(backend, timeout=timeout)
    _destroy_at_exit(backend)
    return True


def _destroy_at_exit(backend: str) -> None:
    """Stop gloo's threads before the interpreter goes: see `runtime.base.GroupRef`.

    NCCL's groups are left to their owner, as destroying one waits for its other ranks.
    """
    if backend == "gloo":
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def make_world(
    mesh: DeviceMesh | None, shard_size: int | None, *, symmetric_memory: bool = False
) -> World:
    """Build the mesh and the communicator of a run.

    Args:
        mesh: one axis (shard), or two (replicate, shard); None makes one from `shard_size`.
        shard_size: ranks that share one copy of the weights; None means all.
        symmetric_memory: let ranks of one host communicate through shared memory.

    Raises:
        ConfigError: the sizes do not divide, or the mesh has more than two axes.
    """
    world_size = dist.get_world_size()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if mesh is None:
        size = shard_size or world_size
        if world_size % size:
            raise ConfigError(
                f"zero_optimization.shard_size={size} does not divide the world size "
                f"{world_size}: use one of {_divisors(world_size)}"
            )
        shape, names = ((size,), ("shard",))
        if size != world_size:
            shape, names = (world_size // size, size), ("replicate", "shard")
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if mesh.ndim > 2:
        raise ConfigError(
            f"the mesh has {mesh.ndim} axes: pass the one to shard over, or two, the first to "
            "replicate over and the second to shard over"
        )
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return World(
        rank=dist.get_rank(),
        world_size=mesh.size(),
        device=device,
        comm=get_communicator(shard_group, replicate_group, symmetric_memory=symmetric_memory),
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
