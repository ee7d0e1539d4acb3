"""Optimizers over this rank's leaves, with torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchloom.config import Config, OptimizerConfig, thawed_map
from torchloom.engine.local import LocalParams
from torchloom.engine.schedules import make_scheduler
from torchloom.errors import ConfigError, EngineError

_CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}

Groups = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
OptimizerFactory = Callable[[Groups], Optimizer]


def make_optimizer(
    config: OptimizerConfig | None,
    optimizer: Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    local: LocalParams,
) -> Optimizer | None:
    """Build the optimizer of a run, or let a caller's own step this rank's leaves.

    Args:
        config: which optimizer to build when the caller brings none.
        optimizer: a torch optimizer over the model's parameters, fresh; or a function from
            parameters to one.
        model_parameters: parameters or parameter groups to optimize; default: all trainable ones.
        local: the leaves.

    Raises:
        EngineError: the optimizer holds foreign parameters, or has stepped already.
        ConfigError: the optimizer does not take the configured arguments.
    """
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise EngineError(
                "the optimizer has stepped before torchloom.initialize: its states belong to "
                "whole parameters. Hand over a fresh optimizer, and load states with "
                "engine.load_checkpoint"
            )
        local.replace_in(optimizer.param_groups)
        return optimizer
    groups = _groups(model_parameters, local)
    if optimizer is not None:
        return optimizer(groups)
    if config is None:
        return None
    params = thawed_map(config.params)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if not ({"fused", "foreach"} & params.keys()):
        # On CPU foreach is 7x slower than fused; CUDA's fused kernels are the fastest as well.
        params["fused"] = True
    try:
        return _CLASSES[config.name](groups, **params)
    except TypeError as error:
        raise ConfigError(f"optimizer.params: {config.name}: {error}") from error


def make_lr_scheduler(config: Config, scheduler: Any, optimizer: Optimizer | None) -> Any:
    """Return the caller's schedule, one made by the caller's function, or the configured one."""
    if optimizer is None:
        return scheduler
    if scheduler is not None and not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    if scheduler is None and config.scheduler is not None:
        params = thawed_map(config.scheduler.params)
        return make_scheduler(config.scheduler.name, params, optimizer)
    return scheduler


def _groups(model_parameters: Iterable[Any] | None, local: LocalParams) -> list[dict[str, Any]]:
    if model_parameters is None:
        return [{"params": [each.leaf for each in local]}]
    entries = list(model_parameters)
    groups = (
        [dict(group) for group in entries]
        if entries and isinstance(entries[0], dict)
        else [{"params": entries}]
    )
    for group in groups:
        group["params"] = list(group["params"])
    local.replace_in(groups)
    return groups
