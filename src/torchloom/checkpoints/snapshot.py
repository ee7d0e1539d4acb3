"""Collects what a checkpoint keeps of an engine, as parts of tensors and plain values.

    model/<param>               every rank its shard, as boxes of the whole, or one rank the whole
    optim/<param>/<state>       likewise, of each state that has an element per element; all of a parameter that one
                                rank owns are whole, and this rank writes them
    grad/<param>                likewise, in the middle of an accumulation
    rank<k>/grad/<param>        gradients that are not averaged yet: each rank's own
    buffer/<name>               persistent buffers
    values                      all the rest: see `engine_values`

Values, buffers among them, are expected to be equal on all ranks. Where one is not, each rank that
differs from rank 0 keeps its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import PayloadPart
from torchloom.checkpoints.engine_values import (
    Counters,
    Leaf,
    Trained,
    config_of,
    kind_of,
    values_of,
)
from torchloom.checkpoints.values import (
    Value,
    Wrappers,
    add_state,
    is_wrapper,
    plain_tensor,
    strides_of,
    wrappers_of,
)
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, layout_of, owners_of
from torchloom.shard.shards import valid_numel

OWNED = "owned"
"""Value of each rank: the states' kinds of the parameters that it owns. Rank 0 puts them among the others when it publishes."""


@dataclass
class EngineSnapshot:
    """The state that one rank saves; see `take`."""

    parts: list[PayloadPart]
    values: dict[str, Value]
    facts: dict[str, Any]
    kinds: str = ""
    """A hash of what divided states there are, which must be equal on all ranks."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Other names of parameters in `state_dict()`, with the names that they are kept under."""

    def staged(self, copy: Callable[[str, Tensor], Tensor]) -> EngineSnapshot:
        """Return the same of copies, which training does not change."""
        parts = [replace(part, tensor=copy(part.key, part.tensor)) for part in self.parts]
        values = {
            name: Value(value.tree, {key: copy(key, each) for key, each in value.tensors.items()})
            for name, value in self.values.items()
        }
        return replace(self, parts=parts, values=values)

    def digests(self) -> dict[str, str]:
        """Return a hash of each value."""
        return {name: value.digest() for name, value in self.values.items()}


def take(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any], *, exclude_frozen: bool
) -> EngineSnapshot:
    """Collect what a checkpoint keeps; tensors are the engine's own, not copies.

    Args:
        engine: what is saved.
        counters: where the run stands.
        client_state: the caller's own plain data.
        exclude_frozen: whether to leave out parameters that are not trained.

    Raises:
        CheckpointError: something cannot be kept; it is named.
    """
    layout, params = layout_of(engine.module), owners_of(engine.module)
    writers = Writers(engine.world, layout)
    values = dict(values_of(engine, counters, client_state))
    parts: list[PayloadPart] = []
    divided: list[tuple[str, Any]] = []
    for spec in layout:
        if spec.requires_grad or not exclude_frozen:
            parts += writers.parts(
                f"model/{spec.name}", spec, params[spec.name], spec.mode == "sharded"
            )
    owned: dict[str, Any] = {}
    wrappers = wrappers_of(engine.optimizer)
    for each in engine.local:
        name = f"optim/{each.spec.name}"
        if engine.optimizer is None or each.param not in engine.optimizer.state:
            continue
        is_owned = engine.local.is_owned(each.param)
        if is_owned and writers.replica:
            continue  # the rank that owns it in another copy of the weights writes it
        held = engine.optimizer.state[each.param]
        states = _states_of(each, held, writers, parts, wrappers, is_owned=is_owned)
        if is_owned:
            owned[name] = states.tree
        else:
            values[name] = states
            divided.append((name, [[key, kind] for key, kind, _ in states.tree]))
    values[OWNED] = Value(owned)
    gradients = dict(_gradients_of(engine, writers, parts))
    values["gradients"] = Value(gradients)
    divided += [(name, kind) for name, kind in gradients.items() if kind != "local"]
    facts = {
        "stage": layout.stage,
        "world_size": engine.world.world_size,
        "params": {spec.name: list(spec.shape) for spec in layout},
        "global_steps": counters.global_steps,
        "global_samples": counters.global_samples,
        "accumulation_steps": engine.gradient_accumulation_steps(),
        "scales_loss": engine.scaler.config is not None,
        "optimizer": kind_of(engine.optimizer),
        "scheduler": kind_of(engine.lr_scheduler),
        "model_config": config_of(engine.module),
    }
    # A rank that lacks a divided state would leave a hole in the stored tensor.
    kinds = hashlib.sha256(json.dumps(divided).encode()).hexdigest()[:16]
    return EngineSnapshot(parts, values, facts, kinds, _tied_names(engine.module))


class Writers:
    """Which rank writes what several hold: the same on all ranks, and evenly."""

    def __init__(self, world: Any, layout: Layout) -> None:
        self.rank, self._layout = world.rank, layout
        group = world.comm.replicate_group
        self.replica = 0 if group is None else group.rank
        self._of: dict[str, int] = {}
        loads = [0] * world.world_size
        for spec in layout:
            self._of[spec.name] = least = loads.index(min(loads))
            loads[least] += spec.numel
        self._index = {spec.name: index for index, spec in enumerate(layout)}

    def parts(
        self, key: str, spec: ParamSpec, tensor: Tensor, is_divided: bool
    ) -> list[PayloadPart]:
        """Return the part of a tensor that this rank writes, if any.

        Args:
            key: under which it is stored.
            spec: of its parameter.
            tensor: flat, with padding, or the same on all ranks.
            is_divided: whether each rank holds a shard of it.
        """
        shape, tensor = tuple(spec.shape), tensor.detach()
        if not is_divided:
            is_mine = self._of[spec.name] == self.rank
            return [PayloadPart(key, tensor.reshape(shape), shape)] if is_mine else []
        numel, rank = tensor.numel(), self._layout.rank
        valid = valid_numel(spec.numel, rank, numel)
        if valid == 0 or self._index[spec.name] % self._layout.num_replicas != self.replica:
            return []
        return [PayloadPart(key, tensor[:valid], shape, rank * numel)]


def _states_of(
    each: Leaf,
    states: Mapping[Any, Any],
    writers: Writers,
    parts: list[PayloadPart],
    wrappers: Wrappers,
    *,
    is_owned: bool,
) -> Value:
    """Return the optimizer's states of a parameter by kind, those that are plain with their values.

    Args:
        each: the parameter.
        states: by name.
        writers: which rank writes what.
        parts: receives what this rank writes.
        wrappers: classes that states may be of beside plain tensors.
        is_owned: whether this rank alone has the states, of the whole parameter: it writes all tensors among them.

    Raises:
        CheckpointError: a state cannot be kept; it is named.
    """
    value, whole = Value([]), tuple(each.spec.shape)
    for key, state in states.items():
        full, where = _named(each, key)
        is_divided = each.is_divided and not is_owned
        if not is_wrapper(state) and _is_shard(
            key, state, each.shard_shape if is_divided else whole
        ):
            plain = plain_tensor(state, where)
            if is_owned:
                parts.append(PayloadPart(full, plain, whole))
            else:
                parts += writers.parts(full, each.spec, plain, is_divided)
            # "piece" is the word of the format; shards are flat
            value.tree.append([key, "piece", None if is_divided else strides_of(plain)])
            continue
        if is_divided and isinstance(state, Tensor) and state.numel() > 1:
            raise CheckpointError(
                f"{where} has shape {list(state.shape)}, its shard of the parameter "
                f"{list(each.shard_shape)}: a checkpoint keeps states with an element per element, and "
                "single numbers. Leave it to an owner: an optimizer that is declared elementwise keeps no others"
            )
        add_state(value, key, state, full, where, wrappers)
    if is_owned:
        parts += [
            PayloadPart(name, held, tuple(held.shape)) for name, held in value.tensors.items()
        ]
    return value


def _named(each: Leaf, key: Any) -> tuple[str, str]:
    """Return the name of a state in a checkpoint and in messages.

    Raises:
        CheckpointError: it has no name.
    """
    if type(key) not in (str, int):
        raise CheckpointError(
            f"the optimizer's state of {each.spec.name!r} has a key {key!r}: a checkpoint "
            "keeps states that are named by texts or numbers"
        )
    return f"optim/{each.spec.name}/{key}", f"the optimizer's state {key!r} of {each.spec.name!r}"


def _is_shard(key: str | int, state: Any, shape: tuple[int, ...]) -> bool:
    """Say whether a state has an element per element of a parameter's shard."""
    if not isinstance(state, Tensor) or tuple(state.shape) != shape:
        return False
    return state.dim() > 0 or key != "step"  # of a scalar parameter


def _gradients_of(
    engine: Trained, writers: Writers, parts: list[PayloadPart]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each gradient that waits for more micro-steps, and "averaged" or "local".

    Args:
        engine: what is saved.
        writers: which rank writes what.
        parts: receives what this rank writes.

    Raises:
        CheckpointError: a gradient cannot be kept; it is named.
    """
    for each in engine.local:
        grad, spec = each.param.grad, each.spec
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise CheckpointError(
                f"the gradient of {spec.name!r} is {grad.layout}, which a checkpoint cannot keep: "
                "save at the boundary of an accumulation"
            )
        key, is_local = f"grad/{spec.name}", spec.mode == "whole"
        if is_local:
            flat = grad.detach().reshape(-1)
            parts.append(PayloadPart(f"rank{writers.rank}/{key}", flat, (spec.numel,)))
        else:
            parts += writers.parts(key, spec, grad, spec.mode == "sharded")
        yield spec.name, "local" if is_local else "averaged"


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names in `state_dict()` that are of a tensor which a checkpoint keeps under another one."""
    owners = owners_of(model)
    kept = {id(owners[spec.name]): spec.name for spec in layout_of(model)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: kept[id(param)] for name, param in named if kept.get(id(param), name) != name}
