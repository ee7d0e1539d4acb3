"""What a checkpoint keeps of an engine, as parts of tensors and plain values.

    model/<param>               every rank its shard, as boxes of the whole, or one rank the whole
    optim/<param>/<state>       likewise, of each state that has an element per element
    grad/<param>                likewise, in the middle of an accumulation
    rank<k>/grad/<param>        gradients that are not averaged yet: each rank's own
    buffer/<name>               persistent buffers
    values                      all the rest: see `plain_values`

Values, buffers among them, are expected to be equal on all ranks. Where one is not, each rank that
differs from rank 0 keeps its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.checkpoints import rng
from torchloom.checkpoints.plain_values import Value, kind_of, value_of, values_of
from torchloom.checkpoints.tensors import PayloadPart
from torchloom.checkpoints.trained import Counters, Leaf, Trained
from torchloom.checkpoints.values import plain_tensor
from torchloom.checkpoints.weight_files import config_of
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, layout_of, owners_of
from torchloom.shard.shards import valid_numel


@dataclass
class EngineSnapshot:
    """The state that one rank saves; see `take`."""

    parts: list[PayloadPart]
    values: dict[str, Value]
    pieces: str
    """A hash of what divided states there are, which must be equal on all ranks."""
    facts: dict[str, Any]
    generators: bytes
    tied: dict[str, str]
    """Other names of parameters and buffers in `state_dict()`, with the names that they are kept under."""

    def staged(self, copy: Callable[[str, Tensor], Tensor]) -> EngineSnapshot:
        """Return the same of copies, which training does not change."""
        parts = [replace(part, tensor=copy(part.key, part.tensor)) for part in self.parts]
        values = {
            name: Value(value.tree, {key: copy(key, each) for key, each in value.tensors.items()})
            for name, value in self.values.items()
        }
        return replace(self, parts=parts, values=values)


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
    layout = layout_of(engine.module)
    writers = Writers(engine.world, layout)
    of_params = {id(each.param): each.spec.name for each in engine.local}
    values = dict(values_of(engine, counters, client_state, of_params))
    parts = list(weights_of(engine, layout, writers, exclude_frozen))
    states = list(states_of(engine, writers))
    for name, value, of_param in states:
        values[name] = value
        parts += of_param
    gradients = list(gradients_of(engine, writers))
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
        "scales_loss": engine.scaler.config is not None,
        "optimizer": kind_of(engine.optimizer),
        "scheduler": kind_of(engine.lr_scheduler),
        "model_config": config_of(engine.module),
    }
    # Each rank's list of divided states, without their values: a rank that lacks one would leave a
    # hole in the stored tensor.
    pieces = json.dumps([(name, _kinds(tree)) for name, tree in shared])
    digest = hashlib.sha256(pieces.encode()).hexdigest()[:16]
    return EngineSnapshot(parts, values, digest, facts, rng.capture(), tied_names(engine.module))


def _kinds(tree: Any) -> Any:
    return [[key, kind] for key, kind, _ in tree] if isinstance(tree, list) else tree


class Writers:
    """Which rank writes what several hold: the same on all ranks, and evenly."""

    def __init__(self, world: Any, layout: Layout) -> None:
        self._rank, self._layout = world.rank, layout
        group = world.comm.replicate_group
        self._replica = 0 if group is None else group.rank
        self._of: dict[str, int] = {}
        loads = [0] * world.world_size
        for spec in layout:
            self._of[spec.name] = least = loads.index(min(loads))
            loads[least] += spec.numel
        self._index = {spec.name: index for index, spec in enumerate(layout)}

    def whole(self, key: str, spec: ParamSpec, tensor: Tensor) -> list[PayloadPart]:
        """Return the part to write of a tensor that all ranks hold.

        Args:
            key: under which it is stored.
            spec: of its parameter.
            tensor: the same on all ranks.
        """
        if self._of[spec.name] != self._rank:
            return []
        return [PayloadPart(key, tensor.detach().reshape(spec.shape), tuple(spec.shape))]

    def shard(self, key: str, spec: ParamSpec, tensor: Tensor) -> list[PayloadPart]:
        """Return the part to write of a tensor of which each rank holds a shard.

        Args:
            key: under which it is stored.
            spec: of its parameter.
            tensor: flat, with padding.
        """
        if self._index[spec.name] % self._layout.num_replicas != self._replica:
            return []
        numel, rank = tensor.numel(), self._layout.rank
        valid = valid_numel(spec.numel, rank, numel)
        if valid == 0:
            return []
        return [PayloadPart(key, tensor.detach()[:valid], tuple(spec.shape), rank * numel)]


def weights_of(
    engine: Trained, layout: Layout, writers: Writers, exclude_frozen: bool
) -> Iterator[PayloadPart]:
    """Yield the parameters, as far as this rank writes them.

    Args:
        engine: what is saved.
        layout: of its model.
        writers: which rank writes what.
        exclude_frozen: whether to leave out parameters that are not trained.
    """
    params = owners_of(engine.module)
    for spec in layout:
        if spec.requires_grad or not exclude_frozen:
            put = writers.shard if spec.mode == "sharded" else writers.whole
            yield from put(f"model/{spec.name}", spec, params[spec.name])


def states_of(engine: Trained, writers: Writers) -> Iterator[tuple[str, Value, list[PayloadPart]]]:
    """Yield the optimizer's states of each parameter that has any.

    Args:
        engine: what is saved.
        writers: which rank writes what.

    Returns:
        For each parameter the name, the kinds of its states with those that are plain, and the parts
        that this rank writes.

    Raises:
        CheckpointError: a state cannot be kept; it is named.
    """
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
            if is_shard(key, state, each.shard_shape):
                put = writers.shard if each.is_divided else writers.whole
                parts += put(full, each.spec, plain_tensor(state, where))
                value.tree.append([key, "piece", None])  # the word of the format
            elif isinstance(state, Tensor):
                value.tensors[full] = plain_tensor(state, where)
                value.tree.append([key, "value", {"$tensor": full}])
            else:
                made = value_of(where, state, full)
                value.tensors.update(made.tensors)
                value.tree.append([key, "value", made.tree])
            _check_divisible(each, key, state)
        yield name, value, parts


def is_shard(key: str, state: Any, shape: tuple[int, ...]) -> bool:
    """Say whether a state has an element per element of a parameter's shard.

    Args:
        key: of the state.
        state: a tensor or a plain value.
        shape: of the shard.
    """
    if not isinstance(state, Tensor) or tuple(state.shape) != shape:
        return False
    return state.dim() > 0 or key != "step"  # of a scalar parameter


def _check_divisible(each: Leaf, key: str, state: Any) -> None:
    if not each.is_divided or not isinstance(state, Tensor) or state.numel() <= 1:
        return
    if not is_shard(key, state, each.shard_shape):
        raise CheckpointError(
            f"the optimizer's state {key!r} of {each.spec.name!r} has shape {list(state.shape)}, its "
            f"shard of the parameter {list(each.shard_shape)}: a checkpoint keeps states with an "
            "element per element, and single numbers. Use an optimizer that works elementwise, or "
            "stage 0"
        )


def gradients_of(engine: Trained, writers: Writers) -> Iterator[tuple[str, str, list[PayloadPart]]]:
    """Yield the gradients that wait for more micro-steps.

    Args:
        engine: what is saved.
        writers: which rank writes what.

    Returns:
        For each the parameter's name, "averaged" or "local", and the parts that this rank writes.

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
        key = f"grad/{spec.name}"
        if spec.mode == "sharded":
            yield spec.name, "averaged", writers.shard(key, spec, grad)
        elif spec.mode == "synced":
            yield spec.name, "averaged", writers.whole(key, spec, grad)
        else:
            part = PayloadPart(
                f"rank{engine.world.rank}/{key}", grad.detach().reshape(-1), (spec.numel,)
            )
            yield spec.name, "local", [part]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names in `state_dict()` that are of a tensor which a checkpoint keeps under another one.

    Args:
        model: sharded.
    """
    owners = owners_of(model)
    kept = {id(owners[spec.name]): spec.name for spec in layout_of(model)}
    named = model.named_parameters(remove_duplicate=False)
    return {
        name: kept[id(param)]
        for name, param in named
        if id(param) in kept and kept[id(param)] != name
    }
