"""Collects the plain values of an engine that a checkpoint keeps: all that is not cut into parts, by name.

State that others' code keeps where a checkpoint does not look is refused when it is saved, by its name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.checkpoints.values import Value, plain_tensor, value_of
from torchloom.errors import CheckpointError
from torchloom.shard import ParamSpec
from torchloom.shard.state import ORIGINAL, state_dict_mode


def generator_states() -> dict[str, Any]:
    """Return the states of this process's generators, as plain values and tensors."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),  # noqa: NPY002  the one that programs share
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: dict[str, Any]) -> None:
    """Set this process's generators to the states that `generator_states` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class Leaf(Protocol):
    """One trainable parameter, and what this rank's optimizer steps of it."""

    spec: ParamSpec
    param: nn.Parameter
    shard_shape: tuple[int, ...]
    is_divided: bool


class Trained(Protocol):
    """What a checkpoint asks of an engine."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    world: Any
    local: Any
    """Iterates over leaves."""
    scaler: Any
    offloads: Any

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


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the config of a model of transformers, or of one alike, as its config.json has it; None of others.

    Args:
        model: has the config as `model.config`.
    """
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(to_text):
        return None
    return {"architectures": [type(model).__name__], **json.loads(str(to_text()))}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


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


def values_of(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any]
) -> Iterator[tuple[str, Value]]:
    """Yield the name and value of all that is not cut into parts.

    Args:
        engine: what is saved.
        counters: where the run stands.
        client_state: the caller's own.

    Raises:
        CheckpointError: something cannot be kept; it is named.
    """
    model, loader = engine.module, engine.training_dataloader
    plain: dict[str, Any] = {
        "client_state": dict(client_state),
        "counters": vars(counters),
        "scaler": engine.scaler.state_dict(),
        "generators": generator_states(),
    }
    for path, module in modules_with_extra_state(model).items():
        plain[f"extra/{path}"] = module.get_extra_state()
    if engine.lr_scheduler is not None:
        plain["scheduler"] = engine.lr_scheduler.state_dict()
    if has_position(loader):
        plain["loader"] = {"of": type(loader).__name__, "state": loader.state_dict()}
    for name, value in plain.items():
        yield name, value_of(name, value)
    for name, buffer in buffers_of(model).items():
        key = f"buffer/{name}"
        yield key, Value({"$tensor": key}, {key: plain_tensor(buffer, f"the buffer {name!r}")})
    check_modules(model)
    if engine.optimizer is not None:
        yield from _of_optimizer(engine, engine.optimizer)


def _of_optimizer(engine: Trained, optimizer: Optimizer) -> Iterator[tuple[str, Value]]:
    check_keeps_all(optimizer)
    names = {id(each.param): each.spec.name for each in engine.local}
    kept = [_without_states(each) for each in members_of(optimizer)]
    packed = [group for each in kept for group in each["param_groups"]]
    groups = [
        {**plain, "params": [names.get(id(param), param) for param in group["params"]]}
        for group, plain in zip(optimizer.param_groups, packed, strict=True)
    ]
    for index, group in enumerate(groups):
        for param in group["params"]:
            if isinstance(param, Tensor):
                raise CheckpointError(
                    f"the optimizer's group {index} holds a tensor of shape {list(param.shape)} that is no "
                    "trainable parameter of the engine: a checkpoint cannot name it. Give all parameters "
                    "that are trained to torchloom.initialize"
                )
    yield "groups", value_of("groups", groups)
    more = [_beside_states(each) for each in kept]
    if any(more):
        kind = kind_of(optimizer)
        yield BESIDE, value_of(f"what {kind}.state_dict() holds beside states", more, BESIDE)
    others = {key: state for key, state in optimizer.state.items() if id(key) not in names}
    if any(isinstance(key, Tensor) for key in others):
        raise CheckpointError(
            "the optimizer holds states of tensors that are none of the model's parameters: a "
            "checkpoint cannot name them. Give the optimizer the model's parameters alone"
        )
    if others:
        yield "optimizer", value_of("optimizer.state", dict(others), "optimizer")


def kind_of(value: object) -> str | None:
    """Return the name of an optimizer's or schedule's class, None without one."""
    return None if value is None else type(value).__name__


def check_keeps_all(optimizer: Optimizer) -> None:
    """Refuse an optimizer with more state than `state` and `param_groups`, such as a wrapper.

    Raises:
        CheckpointError: it has; which is said.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state is not optimizer.state:
            raise CheckpointError(
                f"{kind} holds another optimizer in {name!r}, whose states a checkpoint would lose: "
                "save without it, or let both share one `state`"
            )
    for each in members_of(optimizer):
        if "param_groups" not in _without_states(each):
            raise CheckpointError(
                f"{type(each).__name__}.state_dict() holds no `param_groups`, so a checkpoint would not know its states: "
                "save without it"
            )


def members_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that step as one, or the one."""
    return optimizer.linked() if hasattr(optimizer, "linked") else [optimizer]


def _without_states(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state dict but for the states of parameters."""
    own = vars(optimizer)
    states = own.get("state")
    try:
        if states is not None:
            own["state"] = {}
        with state_dict_mode("local"):
            return dict(optimizer.state_dict())
    finally:
        if states is not None:
            own["state"] = states


def _beside_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: each for k, each in state_dict.items() if k not in ("state", "param_groups")}


BESIDE = "optimizer/beside states"
"""Value: what each optimizer's `state_dict()` holds beside `state` and `param_groups`."""


def beside_states(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer's `state_dict()` holds beside `state` and `param_groups`."""
    return _beside_states(_without_states(optimizer))


def take_beside_states(optimizer: Any, held: Mapping[str, Any]) -> None:
    """Give an optimizer what `beside_states` returned, by its own `load_state_dict`; states and groups stay as they are.

    Raises:
        CheckpointError: it does not take it.
    """
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict({**_without_states(optimizer), **held})
    finally:
        optimizer.state, optimizer.param_groups = before
    if not is_same(beside_states(optimizer), held):
        raise CheckpointError(
            f"{type(optimizer).__name__}.load_state_dict() does not take {', '.join(map(str, held))}, which its state_dict() "
            "returned: load with load_optimizer_states=False"
        )


def is_same(left: Any, right: Any) -> bool:
    """Say whether two plain values are equal."""
    return value_of("left", left, "").digest() == value_of("right", right, "").digest()


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
        more = sorted(found.keys() - {*module._parameters, *module._buffers, "_extra_state"})
        if more:
            raise CheckpointError(
                f"the module {path or 'itself'} ({kind.__name__}) writes "
                f"{', '.join(more[:3])} into state dicts by _save_to_state_dict, which a checkpoint "
                "would lose: register it as a buffer, or define get_extra_state and set_extra_state"
            )
