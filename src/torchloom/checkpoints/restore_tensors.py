"""Reads weights, buffers, optimizer states and gradients from a checkpoint into host memory; what is returned writes them.

Optimizer states are made from the stored values, without a step of the optimizer: states that it has already are
replaced, and states that the checkpoint lacks are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchloom._torch.tensors import tree_map_only
from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.engine_values import Leaf, Trained, buffers_of
from torchloom.checkpoints.values import Wrappers, is_wrapper, laid_out, rewrapped, wrappers_of
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, gathered, layout_of, owners_of
from torchloom.shard.shards import cut, valid_numel

Write = Callable[[], object]


def check_same_model(layout: Layout, contents: Contents, strict: bool) -> None:
    """Raise unless the checkpoint's parameters are the model's.

    Args:
        layout: of the model.
        contents: the checkpoint.
        strict: names must be equal too, not only the shapes of common names.

    Raises:
        CheckpointError: names or shapes differ.
    """
    saved = contents.params
    have = {spec.name: list(spec.shape) for spec in layout}
    differ = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in have.items()
        if saved.get(name, shape) != shape
    ]
    if strict:
        differ += [f"{name}: not in the checkpoint" for name in sorted(have.keys() - saved.keys())]
        differ += [f"{name}: not in the model" for name in sorted(saved.keys() - have.keys())]
        differ += [
            f"{name}: was frozen and left out of the checkpoint, the model trains it"
            for name in sorted(have.keys() & saved.keys())
            if f"model/{name}" not in contents.index and layout[name].requires_grad
        ]
    if differ:
        more = f"\n  and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise _other_model(
            contents,
            "\n  " + "\n  ".join(differ[:5]) + more + "\nLoad it into the model that wrote it",
            "the parameters that fit by name and shape",
        )


def _other_model(contents: Contents, why: str, what_fits: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(contents.path)!r} is of another model:{why}, or pass load_module_strict=False "
        f"to take {what_fits}"
    )


def read_shard(contents: Contents, key: str, spec: ParamSpec, rank: int, numel: int) -> Tensor:
    """Read a rank's part of a tensor, flat and with padding.

    Args:
        contents: the checkpoint.
        key: name of the tensor there.
        spec: the parameter that the tensor belongs to.
        rank: whose part, 0 of a tensor that all hold.
        numel: elements of a part.
    """
    valid = valid_numel(spec.numel, rank, numel)
    value = contents.part(key, min(rank * numel, spec.numel), valid)
    return value if valid == numel else torch.cat([value, value.new_zeros(numel - valid)])


def share_of(spec: ParamSpec, layout: Layout) -> tuple[int, int]:
    """Return which part of a parameter is this rank's, and how many elements parts have."""
    return (layout.rank, spec.shard_numel) if spec.mode == "sharded" else (0, spec.numel)


def read_weights(engine: Trained, contents: Contents) -> Iterator[Write]:
    """Read this rank's parts of all parameters; yield what writes each."""
    layout, params = layout_of(engine.module), owners_of(engine.module)
    for spec in layout:
        key = f"model/{spec.name}"
        if key in contents.index:
            value = read_shard(contents, key, spec, *share_of(spec, layout))
            yield _copy(params[spec.name], value)


def read_buffers(module: nn.Module, contents: Contents, strict: bool) -> Iterator[Write]:
    """Read the persistent buffers; yield what writes each.

    Args:
        module: the model.
        contents: the checkpoint.
        strict: the checkpoint must hold exactly the model's buffers.

    Raises:
        CheckpointError: the model has others.
    """
    have = buffers_of(module)
    saved = {name.removeprefix("buffer/") for name in contents.trees if name.startswith("buffer/")}
    if strict and saved != have.keys():
        odd = ", ".join(sorted(saved ^ have.keys())[:5])
        raise _other_model(
            contents, f" the buffers {odd} are in one of them alone", "those that fit"
        )
    for name in saved & have.keys():
        buffer, value = have[name], contents.value(f"buffer/{name}")
        if not isinstance(value, Tensor) or value.shape != buffer.shape:
            shown = list(value.shape) if isinstance(value, Tensor) else value
            shapes = f"{shown} in the checkpoint, {list(buffer.shape)} in the model"
            raise _other_model(contents, f" buffer {name} has shape {shapes}", "nothing of it")
        yield _into_buffer(module, name, buffer, value)


def whole_weights(engine: Trained, contents: Contents) -> dict[str, Tensor]:
    """Read all weights and buffers whole, for a function of the caller's.

    Raises:
        CheckpointError: they cannot be read.
    """
    names = {f"model/{spec.name}": spec.name for spec in layout_of(engine.module)}
    source = {name: contents.whole(key) for key, name in names.items() if key in contents.index}
    for name in buffers_of(engine.module):
        if f"buffer/{name}" in contents.trees:
            source[name] = contents.value(f"buffer/{name}")
    return source


def load_by_function(
    engine: Trained, source: dict[str, Tensor], function: Callable[..., object]
) -> list[Write]:
    """Let the caller's function load whole weights; return what writes the shards that came of it.

    All ranks must call, as weights are gathered. The model is as it was afterwards.

    Args:
        engine: its model is gathered meanwhile.
        source: whole weights of the checkpoint, by name.
        function: called with `src` (the source) and `dst` (the model, with whole weights).

    Raises:
        Exception: whatever the function raises.
    """
    module, layout = engine.module, layout_of(engine.module)
    params, writes = owners_of(module), []
    before = {name: buffer.clone() for name, buffer in buffers_of(module).items()}
    with gathered(module):
        try:
            with torch.no_grad():
                function(src=source, dst=module)
            shards = []
            for spec in layout:
                whole = params[spec.name].detach()
                if spec.mode == "sharded":
                    whole = cut(whole, layout.rank, spec.shard_numel)
                shards.append((params[spec.name], whole.cpu().clone()))
            writes += [
                _into_buffer(module, name, buffer, buffer.detach().clone())
                for name, buffer in buffers_of(module).items()
            ]
        finally:
            for name, buffer in buffers_of(module).items():
                _into_buffer(module, name, buffer, before[name])()
    return writes + [_copy(param, shard) for param, shard in shards]


def _into_buffer(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> Write:
    """Return what writes a buffer: in place, or anew where its memory cannot be written."""
    dims = zip(buffer.stride(), buffer.shape, strict=True)
    is_expanded = any(stride == 0 and size > 1 for stride, size in dims)
    if not (is_expanded or buffer.is_inference()):
        return _copy(buffer, value)
    path, _, own = name.rpartition(".")
    fresh = value.to(device=buffer.device, dtype=buffer.dtype).clone()
    return lambda: setattr(module.get_submodule(path), own, fresh)


def _copy(target: Tensor, value: Tensor) -> Write:
    fitted = value.reshape(target.shape)
    return lambda: target.detach().copy_(fitted)


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
    local, wrappers = engine.local, wrappers_of(optimizer)
    by_leaf = {
        each.param: _read(each, contents, layout, wrappers, is_owned=local.is_owned(each.param))
        for each in local
        if local.keeps_states(each.param)
    }
    others = contents.value("optimizer") if "optimizer" in contents.trees else {}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def write() -> None:
        for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
            del optimizer.state[key]
        optimizer.state.update(others)
        for each in local:
            before, states = optimizer.state.pop(each.param, {}), by_leaf.get(each.param)
            leaf = each.param
            group = groups.get(id(leaf), {})
            if states:
                optimizer.state[leaf] = {
                    key: _placed(engine, leaf, key, value, before.get(key), group)
                    for key, value in states.items()
                }

    return write


def _read(
    each: Leaf, contents: Contents, layout: Layout, wrappers: Wrappers, *, is_owned: bool
) -> dict[str, Any]:
    """Read the states of a parameter, or of this rank's shard of it.

    Raises:
        CheckpointError: they are of the whole parameter, and this rank's optimizer steps a shard.
    """
    name, is_divided = f"optim/{each.spec.name}", each.is_divided and not is_owned
    states: dict[str, Any] = {}
    for key, kind, value in contents.trees.get(name, ()):
        if kind == "piece" and is_divided:
            numel = math.prod(each.shard_shape)
            states[key] = read_shard(contents, f"{name}/{key}", each.spec, layout.rank, numel)
        elif kind == "piece":
            whole = contents.whole(f"{name}/{key}")
            if value is None and not is_owned:  # of shards, which were flat
                whole = torch.empty_like(each.param, dtype=whole.dtype, device="cpu").copy_(whole)
            states[key] = laid_out(whole, value)
        else:
            state = states[key] = contents.fetch(name, value, wrappers)
            if is_divided and isinstance(state, Tensor) and state.numel() > 1:
                raise CheckpointError(
                    f"the optimizer's state {key!r} of {each.spec.name!r} {list(state.shape)} is of the whole parameter, and "
                    "this run's optimizer steps shards: declare it elementwise in both runs or in none"
                )
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

    def on_device(each: Tensor) -> Tensor:
        return rewrapped(each, on_device) if is_wrapper(each) else each.to(leaf.device)

    def placed(each: Tensor) -> Tensor:
        is_moved = not is_wrapper(each)  # the others stay on the device
        return engine.offloads.placed(each, leaf.device) if is_moved else on_device(each)

    if not isinstance(value, Tensor) or is_wrapper(value):  # tensors may be in it
        return tree_map_only(Tensor, placed, value)
    if isinstance(now, Tensor) and _layout_of(now) == _layout_of(value):
        return now.copy_(value)
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()  # torch's optimizers count on the CPU unless told otherwise
    return placed(value)


def _layout_of(value: Tensor) -> tuple[object, ...]:
    return type(value), value.shape, value.stride(), value.dtype


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
