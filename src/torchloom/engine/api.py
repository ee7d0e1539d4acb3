"""`torchloom.initialize` shards a model as a config says, and returns the engine that trains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from torchloom.config import load_config
from torchloom.config.monitors import require_packages
from torchloom.engine.engine import Engine
from torchloom.engine.loader import make_loader
from torchloom.engine.schedules import make_lr_scheduler
from torchloom.errors import ConfigError, ShardError
from torchloom.last_words import show_last_words
from torchloom.launch.groups import make_world, world_size_of
from torchloom.log import get_logger
from torchloom.loop.optimizer_hooks import count_steps_of
from torchloom.loop.optimizers import config_facts, make_optimizer, optimizer_facts, schedule_facts
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.precision import shard_precision
from torchloom.loop.rounding import seed_of_rounding
from torchloom.loop.shard_model import log_notes, meet_within, shard_over
from torchloom.runtime.exchanges import new_agreement
from torchloom.shard import Layout, is_sharded
from torchloom.shard.leaf_modules import mark_leaves
from torchloom.step.description import cast_params

logger = get_logger(__name__)

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


def initialize(  # noqa: PLR0913  the call is DeepSpeed's, argument by argument
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    mesh: DeviceMesh | None = None,
    config_params: ConfigSource | None = None,
    init: Callable[[nn.Module], object] | None = None,
    auto: Mapping[str, object] | None = None,
) -> tuple[Engine, Optimizer | None, Any, Any]:
    """Shard a model and return `(engine, optimizer, dataloader, lr_scheduler)`.

    The config is checked before a process group is made. The model is sharded in place: it stays
    the caller's object, its parameters keep their names.

    Args:
        args: a namespace whose `deepspeed_config` names a config file, as launchers pass it.
        model: a plain model, or one on the meta device.
        optimizer: a fresh torch optimizer over the model's parameters, several, which step together as one, or a
            function that makes one from parameters; default: the one that the config names. It takes the place of the
            config's. One that is not elementwise, such as Muon, sees whole parameters: see docs/howto/muon.md.
        model_parameters: parameters or groups to optimize; default: all trainable ones.
        training_data: a dataset, for which a data loader is made.
        lr_scheduler: a schedule, or a function from optimizer to schedule; it takes the place of the config's.
        distributed_port: rendezvous port, if no launcher has chosen one.
        mpu: not supported; tensor and pipeline parallelism are out of scope.
        dist_init_required: False forbids making a process group here.
        collate_fn: for the data loader.
        config: a dict, a path, or a base64 string, shaped like DeepSpeed's.
        mesh: the axis to shard over, or (replicate, shard); default: from the config.
        config_params: another name of `config`.
        init: fills one module's own parameters, for models on meta.
        auto: values for keys of the config that are "auto", by dotted path, as
            `{"optimizer.params.lr": 1e-4}`.

    Raises:
        ConfigError: the arguments or the config contradict each other, or a section of the config needs
            a package that is not installed.
        ShardError: the model is sharded already or cannot be.
        AgreementError: the ranks hold different models or configs.

    Example:
        >>> engine, optimizer, _, _ = initialize(  # doctest: +SKIP
        ...     model=model, config={"train_micro_batch_size_per_gpu": 4}
        ... )
    """
    show_last_words()
    if model is None:
        raise ConfigError("torchloom.initialize needs a model: pass model=")
    if mpu is not None:
        raise ConfigError(
            "mpu= describes tensor or pipeline parallelism, which torchloom does not do: drop it, "
            "and pass mesh= to choose the ranks to shard over"
        )
    source = _one_source(args, config, config_params)
    brought = {"optimizer": optimizer, "scheduler": lr_scheduler}
    replaced = [name for name, value in brought.items() if value is not None]
    filled = {**_rates_of(optimizer), **(auto or {})}
    early = load_config(source, world_size=world_size_of(mesh), auto=filled, replaced=replaced)
    require_packages(early.monitors)
    if is_sharded(model):
        raise ShardError(
            f"this {type(model).__name__} is already sharded: torchloom.initialize takes a plain "
            "model; call torchloom.shard.unshard(model) first to initialize it again"
        )
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required=False, but there is no process group: call "
            "torch.distributed.init_process_group first, or drop the argument"
        )
    meet_within(early.timeouts, distributed_port)
    world = make_world(mesh, early.zero.shard_size, symmetric_memory=early.compile.symmetric_memory)
    settings = load_config(source, world_size=world.world_size, auto=filled, replaced=replaced)
    log_notes(settings)
    agreement = new_agreement(world.rank, world.world_size)
    agreement.check_facts("the config", config_facts(settings))

    def before_sharding(layout: Layout) -> None:
        cast_params(settings.precision, model, layout)  # refuses names before anything is changed
        if not any(tensor.is_meta for tensor in model.parameters()):
            model.to(world.device)

    mark_leaves(model, settings.zero.leaf_module)
    layout, comm = shard_over(
        model,
        world,
        agreement,
        init=init,
        rounding_seed=seed_of_rounding(settings),
        before=before_sharding,
        stage=settings.zero.stage,
        persistence_threshold=settings.zero.param_persistence_threshold,
        precision=shard_precision(settings.precision),
        sync_in_backward=False,
    )
    world = replace(world, comm=comm)
    local = OwnedParams(model, layout, comm)
    count_steps_of(each.param for each in local)
    made = make_optimizer(settings.optimizer, optimizer, model_parameters, local)
    schedule = make_lr_scheduler(settings, lr_scheduler, made)
    agreement.check_facts("the optimizer", optimizer_facts(made, local))
    agreement.check_facts("the schedule", schedule_facts(schedule))
    engine = Engine(model, settings, world, local, made, schedule, agreement)
    engine.training_dataloader = make_loader(training_data, settings, world, collate_fn)
    if settings.compile.enabled:
        engine.compile()
    return engine, made, engine.training_dataloader, schedule


def _one_source(
    args: Any, config: ConfigSource | None, config_params: ConfigSource | None
) -> ConfigSource | None:
    """Return the config that was given, under whichever of its names."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        raise ConfigError(
            f"the config was given {len(chosen)} times, as {' and '.join(chosen)}: give it once"
        )
    if args is not None and not chosen:
        raise ConfigError(
            f"args= ({type(args).__name__}) has no deepspeed_config, and config= is not given: pass the path or the "
            "dict as config="
        )
    return next(iter(chosen.values()), None)


def _rates_of(optimizer: Any) -> dict[str, object]:
    """Return what "auto" means in a schedule over an optimizer that was given."""
    if not isinstance(optimizer, Optimizer):
        return {}
    return {"scheduler.params.warmup_max_lr": float(optimizer.param_groups[0]["lr"])}
