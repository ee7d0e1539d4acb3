"""Shard a model in the user's own training loop, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchloom.engine.elementwise import watch_steps
from torchloom.engine.groups import ensure_process_group, make_world
from torchloom.engine.own_clipping import follow_torch_norms
from torchloom.engine.own_loops import count_steps_of
from torchloom.engine.precision import cast_inputs_of
from torchloom.engine.twins import communicator_of
from torchloom.errors import ShardError
from torchloom.runtime.exchanges import new_agreement
from torchloom.runtime.lines import show_last_words
from torchloom.shard import (
    Precision,
    facts_of,
    keep_hook,
    plan_layout,
    shard_module,
)


def shard_model(
    model: nn.Module,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    *,
    persistence_threshold: int = 100_000,
    precision: Precision | None = None,
    cast_inputs: bool = False,
    init: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Shard a model in place; then use any torch optimizer over `model.parameters()`.

    Rank 0 broadcasts its weights to all ranks. The backward pass averages gradients over ranks. The
    optimizer must step each element independently of others, as torch's do except Adafactor, LBFGS and
    Muon. Any other optimizer raises EngineError at its first step over shards, before it changes any.

    Args:
        model: a plain model, or one on the meta device.
        stage: 3 gathers weights again in backward, 2 keeps gathered weights until then, 0 keeps
            whole parameters.
        mesh: the axis to shard over, or (replicate, shard); default: all ranks.
        persistence_threshold: parameters with fewer elements stay whole.
        precision: dtypes of stored parameters, of compute and of reductions; default: parameters
            in fp32.
        cast_inputs: cast floating-point inputs of the model to `precision.compute`, also those in lists, tuples,
            mappings and dataclasses, as FSDP2's `cast_forward_inputs` does.
        init: fills one module's own parameters, for models on meta.

    Returns:
        The same model.

    Raises:
        ShardError: the stage has no meaning here, the model cannot be sharded, or inputs are to be cast
            without a dtype to compute in.

    Example:
        >>> model = shard_model(nn.Linear(512, 512), stage=3)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # doctest: +SKIP
    """
    show_last_words()
    if stage == 1:
        raise ShardError(
            "stage 1 shards the optimizer alone, which a plain torch optimizer cannot see: use "
            "stage 2 or 3 here, or torchloom.initialize for stage 1"
        )
    compute = None if precision is None else precision.compute
    if cast_inputs and compute is None:
        raise ShardError(
            "cast_inputs=True needs the dtype to cast to: pass "
            "precision=torchloom.shard.Precision(compute=torch.bfloat16) as well"
        )
    watch_steps()
    follow_torch_norms()
    ensure_process_group()
    world = make_world(mesh, None)
    check_devices(model, dist.get_backend())
    agreement = new_agreement(world.rank, world.world_size)
    comm = communicator_of(world.comm, agreement)
    layout = plan_layout(
        model,
        stage=stage,
        world_size=comm.world_size,
        num_replicas=comm.num_replicas,
        rank=comm.rank,
        handle=comm.handle,
        persistence_threshold=persistence_threshold,
        precision=precision,
    )
    agreement.check_facts("the model's parameters", facts_of(model, layout))
    shard_module(model, layout, broadcast=comm.broadcast, init=init, device=world.device)
    if cast_inputs and compute is not None:
        keep_hook(model, cast_inputs_of(model, compute))
    count_steps_of(model.parameters())
    return model


def check_devices(model: nn.Module, backend: str) -> None:
    """Refuse parameters and buffers that the process group's backend cannot reach.

    Args:
        model: about to be sharded on the device where it is; `torchloom.initialize` moves it instead.
        backend: of the process group; one that names several devices reaches all.

    Raises:
        ShardError: some are on the CPU while ranks communicate by NCCL alone, or on several GPUs.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    placed = {name: tensor.device for name, tensor in named if not tensor.is_meta}
    far = next((name for name, d in placed.items() if backend == "nccl" and d.type != "cuda"), None)
    if far is not None:
        raise ShardError(
            f"{far!r} is on {placed[far]}, where NCCL cannot make it equal on all ranks: call "
            "model.cuda() before torchloom.shard_model"
        )
    for name, device in placed.items():
        other, there = next(iter(placed.items()))
        if device != there:
            raise ShardError(
                f"{other!r} is on {there} and {name!r} on {device}: a rank computes on one device; "
                "move the model to it before torchloom.shard_model"
            )
