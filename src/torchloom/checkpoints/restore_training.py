"""Optimizer groups, optimizer states and waiting gradients from a checkpoint, whatever the optimizer has done before.

States are made from the stored values, without a step of the optimizer: states that it has already are
replaced, and states that the checkpoint lacks are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.restore_model import reader
from torchloom.checkpoints.trained import Leaf, Trained
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, layout_of
from torchloom.shard.shards import cut, valid_numel

Groups = list[tuple[dict[str, Any], dict[str, Any]]]
"""Each group of the optimizer, and what to put into it."""


def read_groups(engine: Trained, contents: Contents, *, strict: bool) -> Groups:
    """Return what the optimizer's groups become.

    Args:
        engine: whose optimizer receives them.
        contents: the checkpoint.
        strict: each group must hold the same parameters as in the checkpoint.

    Returns:
        Pairs of a live group and the values to write into it.

    Raises:
        CheckpointError: the groups are others.
    """
    assert engine.optimizer is not None
    names = {id(each.param): each.spec.name for each in engine.local}
    groups, saved = engine.optimizer.param_groups, contents.value("groups")
    if len(groups) != len(saved):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this run has {len(groups)}: build "
            "the optimizer with the same groups, or load with load_optimizer_states=False"
        )
    found: Groups = []
    for index, (group, old) in enumerate(zip(groups, saved, strict=True)):
        have = {names[id(param)] for param in group["params"]}
        odd = sorted(have ^ set(old["params"]))
        if strict and odd:
            raise CheckpointError(
                f"the optimizer's group {index} holds other parameters than in the checkpoint "
                f"({', '.join(odd[:3])}): build it with the same groups, or load with "
                "load_optimizer_states=False"
            )
        values = {key: value for key, value in old.items() if key != "params"}
        for key, value in values.items():
            now = group.get(key)
            if isinstance(now, Tensor):
                values[key] = torch.as_tensor(value).reshape(now.shape)
            elif isinstance(now, tuple) and isinstance(value, list):
                values[key] = tuple(value)
            elif isinstance(value, Tensor) and isinstance(now, float):
                values[key] = value.item()
        found.append((group, values))
    return found


def read_states(engine: Trained, contents: Contents) -> Callable[[], None]:
    """Read the states of this rank's leaves; return what puts them into the optimizer.

    Raises:
        CheckpointError: they cannot be read, or belong to another number of ranks.
    """
    optimizer, layout = engine.optimizer, layout_of(engine.module)
    assert optimizer is not None
    other_ranks = contents.world_size != engine.world.world_size
    own = sorted(name for name in contents.own if name.startswith("optim"))
    if other_ranks and own:
        raise CheckpointError(
            f"the optimizer's states {', '.join(own[:3])} differed between the {contents.world_size} "
            "ranks that saved them: load on as many, or with load_optimizer_states=False"
        )
    by_leaf = {
        each.param: {} if tree is None else _read(each, tree, contents, layout)
        for each in engine.local
        for tree in [contents.state_tree(each.spec.name)]
    }
    others = contents.value("optimizer") if "optimizer" in contents else {}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def write() -> None:
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        optimizer.state.update(others)
        for leaf, states in by_leaf.items():
            _put(engine, leaf, states, groups.get(id(leaf), {}))

    return write


def _read(each: Leaf, tree: list[Any], contents: Contents, layout: Layout) -> dict[str, Any]:
    name = f"optim/{each.spec.name}"
    states: dict[str, Any] = {}
    for key, kind, value in tree:
        if kind != "piece":
            states[key] = contents.fetch(name, value)
            continue
        numel, rank = math.prod(each.shard_shape), layout.rank if each.is_divided else 0
        start = min(rank * numel, each.spec.numel)
        valid = valid_numel(each.spec.numel, rank, numel)
        part = contents.payload.part(f"{name}/{key}", start, valid)
        if valid < numel:
            part = torch.cat([part, part.new_zeros(numel - valid)])
        states[key] = part.view(each.shard_shape)
    return states


def _put(engine: Trained, leaf: Tensor, states: dict[str, Any], group: dict[str, Any]) -> None:
    """Give a parameter these states; tensors that fit keep their place in memory."""
    assert engine.optimizer is not None
    if not states:
        engine.optimizer.state.pop(leaf, None)
        return
    have = engine.optimizer.state[leaf]
    for key in have.keys() - states.keys():
        del have[key]
    for key, value in states.items():
        if not isinstance(value, Tensor):
            have[key] = value
            continue
        now = have.get(key)
        if isinstance(now, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
            now.copy_(value)
        elif key == "step" and not (group.get("capturable") or group.get("fused")):
            have[key] = value.clone()  # torch's optimizers count on the CPU unless told otherwise
        else:
            have[key] = engine.offloads.placed(value, like=leaf)


def read_gradients(
    engine: Trained, contents: Contents, factor: float
) -> Iterator[Callable[[], object]]:
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
        found = [name for name in local if name in contents.payload]
        is_local = spec.mode == "whole"
        if is_local and same and found:
            if mine.get(spec.name) == "local":
                value = contents.payload.whole(local[engine.world.rank])
                yield _set_grad(each.param, value, factor)
        elif found:
            mean = sum(contents.payload.whole(name).double() for name in found) / len(local)
            assert isinstance(mean, Tensor)
            whole = mean.to(spec.dtype)
            value = cut(whole, layout.rank, spec.shard_numel) if spec.mode == "sharded" else whole
            yield _set_grad(each.param, value, factor)
        elif key in contents.payload:
            value = torch.zeros(each.param.numel(), dtype=contents.payload.index[key].dtype)
            reader(contents, key, spec, layout, value)()
            yield _set_grad(each.param, value, factor)


def is_gradient(key: str) -> bool:
    """Say whether a tensor's name is that of a gradient."""
    return re.match(r"(rank\d+/)?grad/", key) is not None


def _set_grad(param: nn.Parameter, value: Tensor, factor: float) -> Callable[[], None]:
    fitted = value.reshape(param.shape)

    def write() -> None:
        grad = torch.empty_like(param).copy_(fitted)
        param.grad = grad if factor == 1.0 else grad.mul_(factor)

    return write
