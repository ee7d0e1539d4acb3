"""Counting the optimizer steps of loops without an engine, so that ranks can compare them.

A rank that leaves a step out communicates like the others and trains to other weights. The steps of any
torch optimizer over shards count, by torch's public hook; those of other optimizers do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchloom.engine.rates import note_rates
from torchloom.position import POSITION
from torchloom.runtime import tell_step

_SHARDED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters of models that `shard_model` sharded, by their id."""


def count_steps_of(params: Iterable[nn.Parameter]) -> None:
    """Let steps of optimizers over these parameters count as steps of this process."""
    if not _SHARDED:
        _hook_once()
    _SHARDED.update({id(param): param for param in params})


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # One parameter of each group tells whose it is: groups are made of one model's parameters.
    firsts = (group["params"][0] for group in optimizer.param_groups if group["params"])
    if any(_SHARDED.get(id(param)) is param for param in firsts):
        POSITION.step += 1
        note_rates(optimizer)
        tell_step(POSITION.step)


_IS_HOOKED: list[bool] = []


def _hook_once() -> None:
    if not _IS_HOOKED:
        _IS_HOOKED.append(True)
        register_optimizer_step_post_hook(_after_step)
