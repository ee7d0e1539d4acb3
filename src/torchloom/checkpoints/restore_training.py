"""Reads optimizer groups, optimizer states and waiting gradients from a checkpoint, whatever the optimizer has done before.

States are made from the stored values, without a step of the optimizer: states that it has already are
replaced, and states that the checkpoint lacks are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.engine_values import Leaf, Trained
from torchloom.checkpoints.restore_model import Write, read_shard, share_of
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, layout_of
from torchloom.shard.shards import cut


def read_groups(engine: Trained, contents: Contents, *, strict: bool) -> Write:
    """Read what the optimizer's groups become; return what puts it into them.

    Args:
        engine: whose optimizer receives them.
        contents: the checkpoint.
        strict: each group must hold the same parameters as in the checkpoint.

    Raises:
        CheckpointError: the groups are others.
    """
    assert engine.optimizer is not None
    names = {id(each.param): each.spec.name for each in engine.local}
    groups, saved = engine.optimizer.param_groups, contents.value("groups")
    wayout = "build it with the same groups, or load with load_optimizer_states=False"
    if len(groups) != len(saved):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this run's optimizer has {len(groups)}: "
            f"{wayout}"
        )
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for index, (group, old) in enumerate(zip(groups, saved, strict=True)):
        odd = sorted({names[id(param)] for param in group["params"]} ^ set(old["params"]))
        if strict and odd:
            raise CheckpointError(
                f"the optimizer's group {index} holds other parameters than in the checkpoint "
                f"({', '.join(odd[:3])}): {wayout}"
            )
        values = {
            key: _like(group.get(key), value) for key, value in old.items() if key != "params"
        }
        found.append((group, values))

    def write() -> None:
        for group, values in found:
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    return write


def _like(now: Any, value: Any) -> Any:
    """Return a setting of a group as the kind that it is here."""
    if isinstance(now, Tensor):
        return torch.as_tensor(value).reshape(now.shape)
    if isinstance(now, tuple) and isinstance(value, list):
        return tuple(value)
    return value.item() if isinstance(value, Tensor) and isinstance(now, float) else value


def read_states(engine: Trained, contents: Contents) -> Write:
    """Read the states of this rank's leaves; return what puts them into the optimizer.

    Raises:
        CheckpointError: they cannot be read, or belong to another number of ranks.
    """
    optimizer, layout = engine.optimizer, layout_of(engine.module)
    assert optimizer is not None
    own = sorted(name for name in contents.own if name.startswith("optim"))
    if own and contents.world_size != engine.world.world_size:
        raise CheckpointError(
            f"the optimizer's states {', '.join(own[:3])} differed between the {contents.world_size} "
            "ranks that saved them: load on as many, or with load_optimizer_states=False"
        )
    by_leaf = {each.param: _read(each, contents, layout) for each in engine.local}
    others = contents.value("optimizer") if "optimizer" in contents.trees else {}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def write() -> None:
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        optimizer.state.update(others)
        for leaf, states in by_leaf.items():
            before = optimizer.state.pop(leaf, {})
            group = groups.get(id(leaf), {})
            if states:
                optimizer.state[leaf] = {
                    key: _placed(engine, leaf, key, value, before.get(key), group)
                    for key, value in states.items()
                }

    return write


def _read(each: Leaf, contents: Contents, layout: Layout) -> dict[str, Any]:
    name = f"optim/{each.spec.name}"
    states: dict[str, Any] = {}
    for key, kind, value in contents.trees.get(name, ()):
        if kind == "piece":
            rank, numel = layout.rank if each.is_divided else 0, math.prod(each.shard_shape)
            value = read_shard(contents, f"{name}/{key}", each.spec, rank, numel)
            states[key] = value.view(each.shard_shape)
        else:
            states[key] = contents.fetch(name, value)
    return states


def _placed(
    engine: Trained, leaf: Tensor, key: str, value: Any, now: Any, group: dict[str, Any]
) -> Any:
    """Return a state where the optimizer keeps it; a tensor that fits keeps its place in memory.

    Args:
        engine: says where states live.
        leaf: the parameter.
        key: of the state.
        value: what was read.
        now: the state that the parameter has, or None.
        group: of the parameter.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
        return now.copy_(value)
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()  # torch's optimizers count on the CPU unless told otherwise
    return engine.offloads.placed(value, like=leaf)


def read_gradients(engine: Trained, contents: Contents, factor: float) -> Iterator[Write]:
    """Read the gradients that were waiting for more micro-steps; drop those that wait here.

    Local gradients are not averaged over ranks yet; if the number of ranks has changed, each rank takes
    their mean.

    Args:
        engine: whose gradients are replaced.
        contents: the checkpoint.
        factor: the loss scale now, divided by that of the checkpoint.

    Returns:
        Functions that each set one gradient; the first drops all that wait.
    """
    yield engine.local.zero_grad
    layout, same = layout_of(engine.module), contents.world_size == engine.world.world_size
    mine = contents.value("gradients")
    for each in engine.local:
        spec, key = each.spec, f"grad/{each.spec.name}"
        local = [f"rank{rank}/{key}" for rank in range(contents.world_size)]
        found = [name for name in local if name in contents.index]
        if spec.mode == "whole" and same and found:
            if mine.get(spec.name) != "local":
                continue
            value = contents.whole(local[engine.world.rank])
        elif found:
            total: Any = sum(contents.whole(name).double() for name in found)
            value = cut((total / len(local)).to(spec.dtype), *share_of(spec, layout))
        elif key in contents.index:
            value = read_shard(contents, key, spec, *share_of(spec, layout))
        else:
            continue
        yield _set_grad(each.param, value, factor)


def is_gradient(key: str) -> bool:
    """Say whether a tensor's name is that of a gradient."""
    return re.match(r"(rank\d+/)?grad/", key) is not None


def _set_grad(param: nn.Parameter, value: Tensor, factor: float) -> Write:
    fitted = value.reshape(param.shape)

    def write() -> None:
        grad = torch.empty_like(param).copy_(fitted)
        param.grad = grad if factor == 1.0 else grad.mul_(factor)

    return write
