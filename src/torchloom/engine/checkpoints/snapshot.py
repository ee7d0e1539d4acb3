"""What a checkpoint keeps of an engine, as parts of tensors and plain values.

    model/<param>               flat, without padding; every rank its piece, or one rank the whole
    optim/<param>/<state>       likewise, of each state that has an element per element
    grad/<param>                likewise, in the middle of an accumulation
    rank<k>/grad/<param>        gradients that are not averaged yet: each rank's own
    buffer/<name>               persistent buffers
    values                      all the rest: see `plain`

Values, buffers among them, are expected to be equal on all ranks. Where one is not, each rank that
differs from rank 0 keeps its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.engine.checkpoints import rng
from torchloom.engine.checkpoints.foreign import check_keeps_all, check_modules, kind_of
from torchloom.engine.checkpoints.payload import Part
from torchloom.engine.checkpoints.plain import encode, plain_tensor
from torchloom.engine.groups import World
from torchloom.engine.local import Leaf, LocalParams
from torchloom.engine.offloads import Offloads
from torchloom.engine.scaling import LossScaler
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, layout_of, owners_of
from torchloom.shard.shards import valid_numel


class Trained(Protocol):
    """What a checkpoint holds of an engine."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    world: World
    local: LocalParams
    scaler: LossScaler
    offloads: Offloads

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        ...


@dataclass
class Counters:
    """Where a run stands."""

    global_steps: int
    global_samples: int
    micro_steps: int
    num_backwards: int = 0
    """Backward passes since the last micro-step ended."""
    forced_boundary: bool | None = None
    """What the caller said of the next micro-step."""


@dataclass
class Value:
    """A plain value as JSON, and the tensors in it by the names that the JSON has for them."""

    tree: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a hash that is equal for equal values."""
        digest = hashlib.sha256(json.dumps(self.tree).encode())
        for key, tensor in self.tensors.items():
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            whole = tensor.detach().cpu().contiguous()
            # One element with a stride of two counts as contiguous, and has no view of its bytes.
            flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
            content: Any = flat.numpy()
            digest.update(content)
        return digest.hexdigest()[:16]


@dataclass
class Snapshot:
    """All that one rank has to say; see `take`."""

    parts: list[Part]
    values: dict[str, Value]
    pieces: str
    """A hash of what divided states there are, which must be equal on all ranks."""
    facts: dict[str, Any]
    generators: bytes

    def staged(self, copy: Callable[[str, Tensor], Tensor]) -> Snapshot:
        """Return the same of copies, which training does not change."""
        parts = [replace(part, tensor=copy(part.key, part.tensor)) for part in self.parts]
        values = {
            name: Value(value.tree, {key: copy(key, each) for key, each in value.tensors.items()})
            for name, value in self.values.items()
        }
        return replace(self, parts=parts, values=values)


def take(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any], *, exclude_frozen: bool
) -> Snapshot:
    """Collect what a checkpoint keeps; tensors are the engine's own, not copies.

    Raises:
        CheckpointError: something cannot be kept; it is named.
    """
    layout = layout_of(engine.module)
    writers = _Writers(engine.world, layout)
    names = {id(each.param): each.spec.name for each in engine.local}
    values = dict(_values(engine, counters, client_state, names))
    parts = list(_weights(engine, layout, writers, exclude_frozen))
    states = list(_states(engine, layout, writers))
    for name, value, of_param in states:
        values[name] = value
        parts += of_param
    gradients = list(_gradients(engine, layout, writers))
    values["gradients"] = Value({name: kind for name, kind, _ in gradients})
    parts += [part for *_, found in gradients for part in found]
    shared = [(n, v.tree) for n, v, _ in states] + [(n, k) for n, k, _ in gradients if k != "local"]
    facts = {
        "stage": layout.stage,
        "world_size": engine.world.world_size,
        "params": {spec.name: list(spec.shape) for spec in layout},
        "global_steps": counters.global_steps,
        "global_samples": counters.global_samples,
        "accumulation_steps": engine.gradient_accumulation_steps(),
        "has_optimizer": engine.optimizer is not None,
        "scales_loss": engine.scaler.config is not None,
        "optimizer": kind_of(engine.optimizer),
        "scheduler": kind_of(engine.lr_scheduler),
        "frozen_left_out": exclude_frozen,
    }
    # Each rank's list of divided states, without their values: a rank that lacks one would leave a
    # hole in the stored tensor.
    pieces = json.dumps([(name, _kinds(tree)) for name, tree in shared])
    return Snapshot(
        parts, values, hashlib.sha256(pieces.encode()).hexdigest()[:16], facts, rng.capture()
    )


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep more than parameters and buffers in a state dict."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def has_position(loader: Any) -> bool:
    """Say whether a data loader can tell and take its position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _values(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any], names: dict[int, str]
) -> Iterator[tuple[str, Value]]:
    yield "client_state", _value("client_state", dict(client_state))
    yield "counters", _value("counters", vars(counters))
    yield "scaler", _value("scaler", engine.scaler.state_dict())
    for name, buffer in buffers_of(engine.module).items():
        key = f"buffer/{name}"
        yield key, Value({"$tensor": key}, {key: plain_tensor(buffer, f"the buffer {name!r}")})
    check_modules(engine.module)
    for path, module in modules_with_extra_state(engine.module).items():
        yield f"extra/{path}", _value(f"extra/{path}", module.get_extra_state())
    scheduler, loader, optimizer = engine.lr_scheduler, engine.training_dataloader, engine.optimizer
    if scheduler is not None:
        yield "scheduler", _value("scheduler", scheduler.state_dict())
    if has_position(loader):
        yield (
            "loader",
            _value("loader", {"of": type(loader).__name__, "state": loader.state_dict()}),
        )
    if optimizer is None:
        return
    check_keeps_all(optimizer)
    groups = [
        {**group, "params": [_name_of(param, names, index) for param in group["params"]]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    yield "groups", _value("groups", groups)
    others = {key: state for key, state in optimizer.state.items() if id(key) not in names}
    if any(isinstance(key, Tensor) for key in others):
        raise CheckpointError(
            "the optimizer holds states of tensors that are none of the model's parameters: a "
            "checkpoint cannot name them. Give the optimizer the model's parameters alone"
        )
    if others:
        yield "optimizer", _value("optimizer.state", dict(others), "optimizer")


def _name_of(param: Tensor, names: dict[int, str], group: int) -> str:
    if id(param) not in names:
        raise CheckpointError(
            f"the optimizer's group {group} holds a tensor of shape {list(param.shape)} that is no "
            "trainable parameter of the engine: a checkpoint cannot name it. Give all parameters that "
            "are trained to torchloom.initialize"
        )
    return names[id(param)]


def _value(where: str, value: Any, name: str | None = None) -> Value:
    made = Value(None)

    def keep(tensor: Tensor) -> str:
        key = f"value/{name or where}/{len(made.tensors)}"
        made.tensors[key] = tensor
        return key

    made.tree = encode(value, keep, where)
    return made


class _Writers:
    """Which rank writes what several hold: the same on all ranks, and evenly."""

    def __init__(self, world: World, layout: Layout) -> None:
        self._rank, self._layout = world.rank, layout
        group = world.comm.replicate_group
        self._replica = 0 if group is None else group.rank
        self._of: dict[str, int] = {}
        loads = [0] * world.world_size
        for spec in layout:
            self._of[spec.name] = least = loads.index(min(loads))
            loads[least] += spec.numel
        self._index = {spec.name: index for index, spec in enumerate(layout)}

    def whole(self, key: str, spec: ParamSpec, tensor: Tensor) -> list[Part]:
        """Return the part to write of a tensor that all ranks hold."""
        if self._of[spec.name] != self._rank:
            return []
        return [Part(key, tensor.detach().reshape(-1), (spec.numel,))]

    def piece(self, key: str, spec: ParamSpec, tensor: Tensor) -> list[Part]:
        """Return the part to write of a tensor of which each rank holds a piece."""
        if self._index[spec.name] % self._layout.num_replicas != self._replica:
            return []
        numel, rank = tensor.numel(), self._layout.rank
        valid = valid_numel(spec.numel, rank, numel)
        if valid == 0:
            return []
        return [Part(key, tensor.detach()[:valid], (spec.numel,), rank * numel)]


def _weights(
    engine: Trained, layout: Layout, writers: _Writers, exclude_frozen: bool
) -> Iterator[Part]:
    params = owners_of(engine.module)
    for spec in layout:
        if spec.requires_grad or not exclude_frozen:
            put = writers.piece if spec.mode == "sharded" else writers.whole
            yield from put(f"model/{spec.name}", spec, params[spec.name])


def _states(
    engine: Trained, layout: Layout, writers: _Writers
) -> Iterator[tuple[str, Value, list[Part]]]:
    """Yield the optimizer's states of each parameter that has any."""
    if engine.optimizer is None:
        return
    for each in engine.local:
        if each.param not in engine.optimizer.state:
            continue
        name, value, parts = f"optim/{each.spec.name}", Value([]), []
        for key, state in engine.optimizer.state[each.param].items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"the optimizer's state of {each.spec.name!r} has a key {key!r}: a checkpoint "
                    "keeps states that are named by texts"
                )
            full, where = f"{name}/{key}", f"the optimizer's state {key!r} of {each.spec.name!r}"
            if is_piece(key, state, each.piece_shape):
                put = writers.piece if each.is_divided else writers.whole
                parts += put(full, each.spec, plain_tensor(state, where))
                value.tree.append([key, "piece", None])
            elif isinstance(state, Tensor):
                value.tensors[full] = plain_tensor(state, where)
                value.tree.append([key, "value", {"$tensor": full}])
            else:
                made = _value(where, state, full)
                value.tensors.update(made.tensors)
                value.tree.append([key, "value", made.tree])
            _check_divisible(each, key, state)
        yield name, value, parts


def is_piece(key: str, state: Any, shape: tuple[int, ...]) -> bool:
    """Say whether a state has an element per element of a parameter's piece of this shape."""
    if not isinstance(state, Tensor) or tuple(state.shape) != shape:
        return False
    return state.dim() > 0 or key != "step"  # of a scalar parameter


def _check_divisible(each: Leaf, key: str, state: Any) -> None:
    if not each.is_divided or not isinstance(state, Tensor) or state.numel() <= 1:
        return
    if not is_piece(key, state, each.piece_shape):
        raise CheckpointError(
            f"the optimizer's state {key!r} of {each.spec.name!r} has shape {list(state.shape)}, its "
            f"piece of the parameter {list(each.piece_shape)}: a checkpoint keeps states with an "
            "element per element, and single numbers. Use an optimizer that works elementwise, or "
            "stage 0"
        )


def _gradients(
    engine: Trained, layout: Layout, writers: _Writers
) -> Iterator[tuple[str, str, list[Part]]]:
    """Yield the gradients that wait for more micro-steps."""
    for each in engine.local:
        grad, spec = each.param.grad, each.spec
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise CheckpointError(
                f"the gradient of {spec.name!r} is {grad.layout}, which a checkpoint cannot keep: "
                "save at the boundary of an accumulation"
            )
        key = f"grad/{spec.name}"
        if spec.mode == "sharded":
            yield spec.name, "averaged", writers.piece(key, spec, grad)
        elif spec.mode == "synced":
            yield spec.name, "averaged", writers.whole(key, spec, grad)
        else:
            part = Part(f"rank{engine.world.rank}/{key}", grad.detach().reshape(-1), (spec.numel,))
            yield spec.name, "local", [part]


def _kinds(tree: Any) -> Any:
    return [[key, kind] for key, kind, _ in tree] if isinstance(tree, list) else tree
