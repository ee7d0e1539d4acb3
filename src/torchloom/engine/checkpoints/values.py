"""Plain values of a checkpoint: all that is not cut into parts, each under a name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchloom.engine.checkpoints.foreign import check_keeps_all, check_modules
from torchloom.engine.checkpoints.plain import encode, plain_tensor
from torchloom.engine.checkpoints.trained import (
    Counters,
    Trained,
    buffers_of,
    has_position,
    modules_with_extra_state,
)
from torchloom.errors import CheckpointError


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
