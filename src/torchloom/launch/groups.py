"""Make the process group and the mesh of a run: who takes part, on which device, over which axes."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchloom import envs
from torchloom.errors import ConfigError, PeerLostError, first_line
from torchloom.last_words import show_last_words
from torchloom.launch.rendezvous import RENDEZVOUS_S, is_loopback, meet, serve_store, stay_local
from torchloom.runtime import Communicator, get_communicator


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    comm: Communicator


def world_size_of(mesh: DeviceMesh | None = None) -> int:
    """Return the number of ranks of a mesh; else of the process group, or, before there is one, of the launcher."""
    if isinstance(mesh, DeviceMesh):  # anything else is refused once there is a process group
        return mesh.size()
    return dist.get_world_size() if dist.is_initialized() else envs.launch().world_size


def ensure_process_group(
    port: int = 29500, timeout: timedelta | None = None, *, rendezvous_s: float = RENDEZVOUS_S
) -> bool:
    """Make the default process group unless there is one; return whether it was made here.

    Uses NCCL if CUDA is available, else gloo. A process without a launcher becomes a group of one rank. There,
    and if MASTER_ADDR is a loopback address, sockets listen on loopback only.

    Args:
        port: rendezvous port, where MASTER_PORT is not set.
        timeout: how long a collective may take.
        rendezvous_s: how long ranks may take to come.

    Raises:
        ConfigError: the launcher's variables are incomplete or wrong.
        PeerLostError: some ranks did not come within the limit.
    """
    if dist.is_initialized():
        return False
    launch = envs.launch()
    backend = _choose_backend(launch)
    if launch.world_size == 1 and not envs.is_launched():
        stay_local()
        store: Any = serve_store(world_size=1)
    else:
        place = envs.meeting(port)
        if place is None:
            raise ConfigError(
                f"this is rank {launch.rank} of {launch.world_size}, but MASTER_ADDR is not set: "
                "start the processes with torchrun, or set MASTER_ADDR and MASTER_PORT on every "
                "rank"
            )
        envs.set_default("MASTER_PORT", str(place.port))
        envs.set_default("RANK", str(launch.rank))
        envs.set_default("WORLD_SIZE", str(launch.world_size))
        if is_loopback(place.host):
            stay_local()
        store = meet(launch, place, rendezvous_s)
        if timeout is not None:
            store.set_timeout(timeout)
    try:
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    except (
        RuntimeError,
        ValueError,
    ) as error:  # what c10d and backends raise, by no type of their own
        raise PeerLostError(
            f"rank {launch.rank} of {launch.world_size} could not join the process group over "
            f"{backend} ({first_line(error)}): check that the hosts reach each other, and the network "
            f"interface that {'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME names"
        ) from None
    show_last_words()  # around torch's own hook
    _destroy_at_exit(backend)
    return True


def _choose_backend(launch: envs.Launch) -> str:
    """Return the backend's name; on CUDA, take the device of this place on the host."""
    if not torch.cuda.is_available():
        return "gloo"
    num_devices = torch.cuda.device_count()
    if launch.local_rank >= num_devices:
        raise ConfigError(
            f"rank {launch.rank} has LOCAL_RANK={launch.local_rank}, but this process sees "
            f"{num_devices} CUDA devices: start no more ranks on a host than it has devices"
        )
    torch.cuda.set_device(launch.local_rank)
    return "nccl"


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
        ConfigError: the sizes do not divide, or the mesh does not fit the ranks.
    """
    world_size = dist.get_world_size()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if mesh is not None:
        check_mesh(mesh, world_size, device_type, shard_size)
    else:
        size = shard_size or world_size
        if world_size % size:
            raise ConfigError(
                f"zero_optimization.shard_size={size} does not divide the world size "
                f"{world_size}: use one of its divisors"
            )
        shape, names = ((size,), ("shard",))
        if size != world_size:
            shape, names = (world_size // size, size), ("replicate", "shard")
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
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


def check_mesh(mesh: Any, world_size: int, device_type: str, shard_size: int | None = None) -> None:
    """Refuse a mesh of the caller that does not fit.

    Args:
        mesh: what was passed.
        world_size: ranks of the process group.
        device_type: of the devices that train.
        shard_size: what the config asks for.

    Raises:
        ConfigError: it is no mesh, is of another kind of device, has other axes than one or two, or
            does not hold each rank once; or its last axis is not `shard_size` long.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh= takes a torch.distributed.DeviceMesh, not {type(mesh).__name__}: make one with "
            "torch.distributed.init_device_mesh"
        )
    if not 1 <= mesh.ndim <= 2:
        raise ConfigError(
            f"the mesh has {mesh.ndim} axes: pass the one to shard over, or two, the first to "
            "replicate over and the second to shard over"
        )
    if mesh.device_type != device_type:
        raise ConfigError(
            f"the mesh is one of {mesh.device_type!r} devices, but this process trains on "
            f"{device_type!r}: make it with init_device_mesh({device_type!r}, ...)"
        )
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(world_size)):
        raise ConfigError(
            f"the mesh holds {len(ranks)} ranks, the first {ranks[:16]}, but the process group has {world_size}: a "
            "model is sharded over all of them, so each must be in the mesh, once"
        )
    if shard_size not in (None, mesh.size(mesh.ndim - 1)):
        raise ConfigError(
            f"zero_optimization.shard_size={shard_size} contradicts the mesh, whose last axis has "
            f"{mesh.size(mesh.ndim - 1)} ranks: drop one of the two"
        )
