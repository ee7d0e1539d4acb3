"""Shard a model and clip gradients in the user's own training loop, without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchloom.engine.clipping import clip_, global_norm
from torchloom.engine.elementwise import watch_steps
from torchloom.engine.groups import ensure_process_group, make_world
from torchloom.engine.nonfinite import find_non_finite
from torchloom.engine.own_loops import count_steps_of
from torchloom.engine.twins import communicator_of
from torchloom.errors import NonFiniteError, ShardError
from torchloom.runtime import lookup
from torchloom.runtime.exchanges import new_agreement
from torchloom.runtime.lines import show_last_words
from torchloom.shard import (
    Precision,
    facts_of,
    layout_of,
    owners_of,
    plan_layout,
    shard_module,
)
from torchloom.shard.shards import clear_padding_


def shard_model(
    model: nn.Module,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    *,
    persistence_threshold: int = 100_000,
    precision: Precision | None = None,
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
        init: fills one module's own parameters, for models on meta.

    Returns:
        The same model.

    Raises:
        ShardError: the stage has no meaning here, or the model cannot be sharded.

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
    watch_steps()
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


def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a sharded model by their global norm, with one collective.

    Args:
        model: a sharded model after backward; all ranks must call.
        max_norm: the largest norm.
        error_if_nonfinite: raise on all ranks, before any gradient changes, when one is NaN or Inf
            on any rank; reads the norm on the host. Otherwise clipping scales all gradients by such
            a norm, as torch's function of this name does: NaN makes them NaN, Inf makes finite ones 0.

    Returns:
        The norm before clipping, equal on every rank.

    Raises:
        NonFiniteError: a gradient is not finite; names the rank and the first parameter.

    Example:
        >>> torchloom.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)  # doctest: +SKIP
    """
    layout, params = layout_of(model), owners_of(model)
    divided = [s.name for s in layout if s.mode == "sharded"]
    grads = {name: p.grad for name, p in params.items() if p.grad is not None}
    sharded = [grads[name] for name in divided if name in grads]
    for name in divided:
        if name in grads:
            clear_padding_(grads[name], layout[name].numel, layout.rank)
    whole = [grad for name, grad in grads.items() if layout[name].mode != "sharded"]
    comm = lookup(layout.handle)
    norm = global_norm(sharded, whole, comm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        names = [spec.name for spec in layout if spec.requires_grad]
        found = find_non_finite(names, [grads.get(name) for name in names], (), comm)
        if found is not None:
            raise NonFiniteError(
                f"{found}. No gradient was changed: drop them (optimizer.zero_grad()) to leave this "
                "step out, or pass error_if_nonfinite=False"
            )
        norm = global_norm(sharded, whole, comm, torch.float64)
    clip_(list(grads.values()), norm, max_norm)
    return norm
