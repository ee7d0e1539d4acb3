"""Activation checkpointing as published runs have it: which layers of a model keep what for backward.

    full         each layer keeps its inputs
    layers       every second layer keeps its inputs, the others all (torchtitan's selective "2")
    selective    each layer keeps its attention and every second product (torchtitan's selective "op")

The rules are those of torchtitan's `apply_ac` (pytorch/torchtitan, torchtitan/models/llama/parallelize_llama.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchloom.errors import ConfigError

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_ATTENTION = "_scaled_dot_product_"
POLICIES = "none", "full", "layers", "selective"


def checkpoint_layers(model: nn.Module, policy: str) -> None:
    """Let the layers of a model compute activations again in backward, by a published rule.

    Args:
        model: whose layers are the modules of its longest `ModuleList` or `Sequential`; changed in place.
        policy: one of `POLICIES`.

    Raises:
        ConfigError: there is no such policy, or the model has no list of layers.

    Example:
        >>> checkpoint_layers(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "full")
    """
    if policy not in POLICIES:
        raise ConfigError(f"checkpointing {policy!r}: use one of {', '.join(POLICIES)}")
    if policy == "none":
        return
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    if not lists:
        raise ConfigError(
            f"checkpointing {policy!r}: {type(model).__name__} has no nn.ModuleList or nn.Sequential of layers: call "
            "torch.utils.checkpoint in the model"
        )
    context = {"context_fn": _selective} if policy == "selective" else {}
    for layer in list(max(lists, key=len))[:: 2 if policy == "layers" else 1]:
        layer.forward = partial(_checkpointed, layer.forward, **context)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _selective() -> Any:
    seen = {True: 0, False: 0}  # in recomputation the products are counted again

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        if op in _PRODUCTS:
            seen[ctx.is_recompute] += 1
            keep = seen[ctx.is_recompute] % 2 == 1
        else:
            keep = _ATTENTION in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
