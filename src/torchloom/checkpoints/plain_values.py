"""Plain values of a checkpoint: all that is not cut into parts, each under a name.

State that others' code keeps where a checkpoint does not look is refused when it is saved, by its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.checkpoints.trained import (
    Counters,
    Trained,
    buffers_of,
    has_position,
    modules_with_extra_state,
)
from torchloom.checkpoints.values import encode, plain_tensor
from torchloom.errors import CheckpointError
from torchloom.shard.state import ORIGINAL


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


def values_of(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any], names: dict[int, str]
) -> Iterator[tuple[str, Value]]:
    """Yield the name and value of all that is not cut into parts.

    Args:
        engine: what is saved.
        counters: where the run stands.
        client_state: the caller's own.
        names: of the parameters that are trained, by id.

    Raises:
        CheckpointError: something cannot be kept; it is named.
    """
    yield "client_state", value_of("client_state", dict(client_state))
    yield "counters", value_of("counters", vars(counters))
    yield "scaler", value_of("scaler", engine.scaler.state_dict())
    for name, buffer in buffers_of(engine.module).items():
        key = f"buffer/{name}"
        yield key, Value({"$tensor": key}, {key: plain_tensor(buffer, f"the buffer {name!r}")})
    check_modules(engine.module)
    for path, module in modules_with_extra_state(engine.module).items():
        yield f"extra/{path}", value_of(f"extra/{path}", module.get_extra_state())
    scheduler, loader, optimizer = engine.lr_scheduler, engine.training_dataloader, engine.optimizer
    if scheduler is not None:
        yield "scheduler", value_of("scheduler", scheduler.state_dict())
    if has_position(loader):
        yield (
            "loader",
            value_of("loader", {"of": type(loader).__name__, "state": loader.state_dict()}),
        )
    if optimizer is None:
        return
    check_keeps_all(optimizer)
    groups = [
        {**group, "params": [_name_of(param, names, index) for param in group["params"]]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    yield "groups", value_of("groups", groups)
    others = {key: state for key, state in optimizer.state.items() if id(key) not in names}
    if any(isinstance(key, Tensor) for key in others):
        raise CheckpointError(
            "the optimizer holds states of tensors that are none of the model's parameters: a "
            "checkpoint cannot name them. Give the optimizer the model's parameters alone"
        )
    if others:
        yield "optimizer", value_of("optimizer.state", dict(others), "optimizer")


def _name_of(param: Tensor, names: dict[int, str], group: int) -> str:
    if id(param) not in names:
        raise CheckpointError(
            f"the optimizer's group {group} holds a tensor of shape {list(param.shape)} that is no "
            "trainable parameter of the engine: a checkpoint cannot name it. Give all parameters that "
            "are trained to torchloom.initialize"
        )
    return names[id(param)]


def value_of(where: str, value: Any, name: str | None = None) -> Value:
    """Return a plain value with the tensors in it taken apart.

    Args:
        where: what it is, for messages.
        value: plain data and tensors.
        name: under which its tensors are stored; default: `where`.

    Raises:
        CheckpointError: it holds what a checkpoint cannot keep.
    """
    made = Value(None)

    def keep(tensor: Tensor) -> str:
        key = f"value/{name or where}/{len(made.tensors)}"
        made.tensors[key] = tensor
        return key

    made.tree = encode(value, keep, where)
    return made


def kind_of(value: object) -> str | None:
    """Return the name of an optimizer's or schedule's class, None without one."""
    return None if value is None else type(value).__name__


def check_keeps_all(optimizer: Optimizer) -> None:
    """Refuse an optimizer with more state than `state` and `param_groups`, such as a wrapper.

    Raises:
        CheckpointError: it has; which is said.
    """
    kind = type(optimizer).__name__
    inner = [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, Optimizer) and value.state is not optimizer.state
    ]
    if inner:
        raise CheckpointError(
            f"{kind} holds another optimizer in {inner[0]!r}, whose states a checkpoint would lose: "
            "save without it, or let both share one `state`"
        )
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    found: Any = optimizer.state_dict()
    more = sorted(set(found) - {"state", "param_groups"}) if isinstance(found, Mapping) else ["?"]
    if more:
        raise CheckpointError(
            f"{kind}.state_dict() holds {', '.join(map(str, more[:3]))} beside `state` and "
            "`param_groups`, which a checkpoint would lose: keep it in `state` or `param_groups`"
        )


def check_modules(model: nn.Module) -> None:
    """Refuse modules that write values of their own into state dicts.

    Raises:
        CheckpointError: one does; module and key are named.
    """
    for path, module in model.named_modules():
        kind = getattr(type(module), ORIGINAL, type(module))
        if kind._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        found: dict[str, Any] = {}
        kind._save_to_state_dict(module, found, "", True)
        known = {*module._parameters, *module._buffers, "_extra_state"}
        more = sorted(found.keys() - known)
        if more:
            raise CheckpointError(
                f"the module {path or 'itself'} ({kind.__name__}) writes "
                f"{', '.join(more[:3])} into state dicts by _save_to_state_dict, which a checkpoint "
                "would lose: register it as a buffer, or define get_extra_state and set_extra_state"
            )
