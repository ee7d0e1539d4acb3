"""Shard a model in the user's own training loop, without an engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchloom.config import Config, load_config
from torchloom.config.model import TimeoutsConfig
from torchloom.errors import ConfigError, ShardError
from torchloom.exchange import Agreement
from torchloom.last_words import show_last_words
from torchloom.launch.groups import World, ensure_process_group, make_world, world_size_of
from torchloom.log import get_logger
from torchloom.loop.clip import follow_torch_norms
from torchloom.loop.optimizer_hooks import (
    count_steps_of,
    settle_before_use,
    share_buffers_after_steps,
)
from torchloom.loop.precision import cast_around, shard_precision
from torchloom.loop.rounding import round_stochastically, seed_of_rounding
from torchloom.loop.slices import step_in_slices
from torchloom.runtime import Communicator, for_model, lookup
from torchloom.runtime.exchanges import new_agreement
from torchloom.runtime.lines import set_limits
from torchloom.shard import (
    ByModule,
    Layout,
    Precision,
    facts_of,
    keep_hook,
    living_layouts,
    look_at_backward,
    plan_layout,
    shard_module,
)
from torchloom.shard.leaf_modules import mark_leaves

ConfigSource = Config | Mapping[str, Any] | str | Path


def shard_model(  # noqa: PLR0913  one call with all choices of a loop of one's own
    model: nn.Module,
    stage: int | None = None,
    mesh: DeviceMesh | None = None,
    *,
    persistence_threshold: int | None = None,
    precision: Precision | ByModule | None = None,
    cast_inputs: bool = False,
    init: Callable[[nn.Module], object] | None = None,
    broadcast_buffers: bool | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    gradient_divide_factor: float | None = None,
    config: ConfigSource | None = None,
) -> nn.Module:
    """Shard a model in place; then use any torch optimizer over `model.parameters()`.

    Rank 0 broadcasts its weights to all ranks. The backward pass averages gradients over ranks. An optimizer that steps
    each element independently, as torch's do except Adafactor, LBFGS and Muon, steps shards; any other sees each parameter
    whole, on the one rank that owns it, unless it is declared by an attribute: `optimizer.elementwise = True`. One that is known
    to join numbers of all parameters raises EngineError at its first step, before it changes any.

    Args:
        model: a plain model, or one on the meta device.
        stage: 3 (default) gathers weights again in backward, 2 keeps gathered weights until then, 1 keeps
            whole parameters of which each rank's optimizer steps a slice, 0 keeps whole parameters.
        mesh: the axis to shard over, or (replicate, shard); default: all ranks.
        persistence_threshold: parameters with fewer elements stay whole; default: 100 000, or less where these would
            hold more than a hundredth of the model.
        precision: dtypes of stored parameters, of compute and of reductions; default: trained
            parameters in fp32 (float64 stays float64), frozen ones as they are. By module:
            `{model: one, model.head: other}`, each for the modules below it too, as FSDP2's `mp_policy`.
        cast_inputs: cast floating-point inputs of the model to `precision.compute` and results to `precision.output`,
            also those in lists, tuples, mappings and dataclasses, as FSDP2's `cast_forward_inputs` does; of each module
            that `precision` names.
        init: fills one module's own parameters, for models on meta.
        broadcast_buffers: give all ranks the persistent buffers of rank 0, such as running statistics, after each step;
            default: at stages 0 and 1, in place of DistributedDataParallel, which does so before the next forward.
        ignored_params: parameters of the model that are left to the caller, as by FSDP2: they stay whole, of their dtype
            and this rank's own values, and their gradients are not averaged. Files and norms hold those of rank 0.
        gradient_divide_factor: gradients are the sum over ranks, divided by this; 1.0 gives the sum. Default: the number
            of ranks, which gives the mean.
        config: a configuration as for `torchloom.initialize`, of which the sections `zero_optimization`, `bf16`,
            `communication_data_type` and `timeouts` say what the arguments above would; in bf16 inputs are cast.

    Returns:
        The same model.

    Raises:
        ShardError: the stage has no meaning here, the model cannot be sharded, inputs are to be cast
            without a dtype to compute in, or gradients are to be divided by no positive number.
        ConfigError: the config is wrong, contradicts an argument, or asks for fp16.

    Example:
        >>> model = shard_model(nn.Linear(512, 512), stage=3)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # doctest: +SKIP
    """
    show_last_words()
    settings = None if config is None else _read(config, mesh)
    if settings is not None:
        given = {
            "stage": stage,
            "persistence_threshold": persistence_threshold,
            "precision": precision,
        }
        _refuse_both([name for name, value in given.items() if value is not None])
        stage = settings.zero.stage
        persistence_threshold = settings.zero.param_persistence_threshold
        precision = shard_precision(settings.precision)
        cast_inputs = cast_inputs or precision.compute is not None
        mark_leaves(model, settings.zero.leaf_module)
    stage = 3 if stage is None else stage
    by_module = precision if isinstance(precision, Mapping) else {model: precision or Precision()}
    for each in by_module.values():
        if not isinstance(each, Precision):
            raise ShardError(
                f"precision= is given {each!r}: pass torchloom.shard.Precision(compute={each!r}), or such by module"
            )
    if cast_inputs and not any(each.compute for each in by_module.values()):
        raise ShardError(
            "cast_inputs=True needs the dtype to cast to: pass "
            "precision=torchloom.shard.Precision(compute=torch.bfloat16) as well"
        )
    factor = gradient_divide_factor
    if factor is not None and not 0 < factor < math.inf:
        raise ShardError(
            f"gradient_divide_factor={factor} divides no gradients: pass a positive number"
        )
    if settings is None:
        ensure_process_group()
    else:
        meet_within(settings.timeouts)
        warn_of_monitors(settings, "torchloom.shard_model")
    world = make_world(mesh, None if settings is None else settings.zero.shard_size)
    check_devices(model, dist.get_backend())
    agreement = new_agreement(world.rank, world.world_size)
    if world.world_size == 1 and factor not in (None, 1.0):
        raise ShardError(
            f"gradient_divide_factor={factor} on one rank, where nothing is summed: divide the loss by it instead"
        )
    layout, comm = shard_over(
        model,
        world,
        agreement,
        init=init,
        divide_factor=factor,
        rounding_seed=None if settings is None else seed_of_rounding(settings),
        stage=stage,
        persistence_threshold=persistence_threshold,
        precision=precision,
        ignored=list(ignored_params),
    )
    for module, each in by_module.items() if cast_inputs else ():
        for hook in cast_around(module, each):
            keep_hook(model, hook)
    count_steps_of(model.parameters())
    if layout.num_ranks > 1 and (stage < 2 if broadcast_buffers is None else broadcast_buffers):
        share_buffers_after_steps(model, comm)
    settle_before_use(model)
    if layout.stage == 1:
        step_in_slices(model, layout, comm)
    return model


def _read(config: ConfigSource, mesh: DeviceMesh | None) -> Config:
    """Return a configuration that a loop of one's own can follow."""
    found = config
    if not isinstance(found, Config):
        found = load_config(
            found, world_size=world_size_of(mesh), replaced=("optimizer", "scheduler")
        )
    if found.precision.dtype == "fp16":
        raise ConfigError(
            "fp16.enabled: a loop of one's own scales the loss itself, which shard_model cannot see: use "
            '"bf16": {"enabled": true}, torchloom.initialize, or precision=torchloom.shard.Precision('
            "compute=torch.float16) with torch's ShardedGradScaler instead of config="
        )
    return found


def _refuse_both(names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"{names[0]}= and config= of shard_model say the same thing twice: drop one of the two"
        )


def meet_within(limits: TimeoutsConfig, port: int = 29500) -> None:
    """Join the process group, and let ranks wait for each other as long as a config allows."""
    ensure_process_group(
        port,
        timeout=timedelta(seconds=limits.process_group_s),
        rendezvous_s=limits.rendezvous_s,
    )
    set_limits(limits)


def shard_over(
    model: nn.Module,
    world: World,
    agreement: Agreement,
    *,
    init: Callable[[nn.Module], object] | None,
    divide_factor: float | None = None,
    rounding_seed: int | None = None,
    before: Callable[[Layout], object] = lambda layout: None,
    **how: Any,
) -> tuple[Layout, Communicator]:
    """Shard a model in place over a communicator of its own. All ranks must call.

    Args:
        model: plain, or on meta.
        world: the ranks.
        agreement: between them.
        init: fills one module's own parameters, for models on meta.
        divide_factor: what sums of its gradients are divided by; None: by the number of ranks.
        rounding_seed: of a stochastic rounding; None: there is none.
        before: called once it is planned, before the model changes.
        how: more arguments of `plan_layout`.
    """
    follow_torch_norms()
    look_at_backward()
    comm = _communicator_of(world.comm, agreement, divide_factor)
    layout = plan_layout(
        model,
        world_size=comm.world_size,
        num_replicas=comm.num_replicas,
        rank=comm.rank,
        handle=comm.handle,
        **how,
    )
    before(layout)
    facts = {
        "gradient_divide_factor": divide_factor,
        "seed of stochastic rounding": rounding_seed,
        **facts_of(model, layout),
    }
    agreement.check_facts("the model's parameters", facts)
    shard_module(model, layout, broadcast=comm.broadcast, init=init, device=world.device)
    round_stochastically(model, layout, rounding_seed)
    return layout, comm


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


logger = get_logger(__name__)


def warn_of_monitors(config: Config, caller: str) -> None:
    """Warn of sections that only an engine follows."""
    if config.monitors.sections and dist.get_rank() == 0:
        logger.warning(
            "%s does not write what %s of the config ask for: pass log_to= to torchloom.compile, or use the "
            "trackers of your framework",
            caller,
            ", ".join(config.monitors.sections),
        )


def log_notes(config: Config) -> None:
    """Log what a check of the config translated, assumed or ignored."""
    for note in config.notes if dist.get_rank() == 0 else ():
        level = logging.WARNING if note.level == "warning" else logging.INFO
        logger.log(level, "%s: %s", note.path, note.message)


def _communicator_of(
    comm: Communicator, agreement: Agreement, divide_factor: float | None
) -> Communicator:
    """Return the communicator for a model that is about to be sharded. All ranks must call it.

    A communicator keeps, counts and compares gathered weights by name. So each living model of a process gets its own
    over the same groups, and names and counts of two models do not mix.

    Args:
        comm: over the groups that it will be sharded over.
        agreement: between all ranks, which may have freed earlier models at different times.
        divide_factor: what sums of the model's gradients are divided by; None: by the number of ranks.
    """
    others = (lookup(layout.handle) for layout in living_layouts())
    taken = {other.model for other in others if other.first_handle == comm.first_handle}
    # Not the first free number: ranks may have freed different ones of several earlier models.
    free = max(taken, default=-1) + 1
    found = for_model(comm, agreement.most("the number of models over the same ranks", free))
    found.divide_factor = divide_factor  # also where an earlier model had another one
    return found
