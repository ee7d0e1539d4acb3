"""State dicts of optimizers over shards: whole tensors, as a run without sharding writes and reads them.

    optimizer.state_dict()         gathers: each state has the shape of its whole parameter
    optimizer.load_state_dict(d)   cuts: each rank keeps its shard of what d holds

A parameter that one rank owns, as its optimizer must see it whole, has its states there: all ranks are given them,
and the owner alone keeps what is loaded.

torch's hooks of an optimizer do both, so a framework's own file of optimizer states is that of a run without
sharding, and loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.parameter import is_shard
from torchloom.shard.roots import divided_by_id
from torchloom.shard.shard_tensor import ShardTensor, as_shard_tensor, local_of
from torchloom.shard.shards import cut
from torchloom.shard.state import gather_shard, is_local, state_dict_mode


class Owners(Protocol):
    """Who steps which parameters of one optimizer whole; see `loop.ownership`."""

    def owns(self, param: Tensor) -> bool | None:
        """Say whether this rank is the owner; None of a parameter that each rank steps itself."""
        ...

    def states(self, keep: Callable[[Any], Any]) -> dict[int, dict[str, Any]]:
        """Return the states of owned parameters, from their owners, by the id of the parameter. All ranks must call."""
        ...


_FIND: list[Callable[[Optimizer], Owners]] = []
"""Finds the owners of an optimizer's parameters."""


def find_owners_by(find: Callable[[Optimizer], Owners]) -> None:
    """Set the function that finds the owners of an optimizer's parameters."""
    _FIND[:] = [find]


_HOLDS_WHOLE: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers that have the hooks."""


def whole_states(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer over shards write and read whole states.

    The optimizer's first step calls this, and so does `torchloom.compile(model, optimizer=optimizer)`. Call it
    before `optimizer.load_state_dict` so that whole states never stay on the device until that step.
    Calling it again does nothing.

    Args:
        optimizer: a torch optimizer over parameters that `shard_model` sharded. From now on all ranks must
            call its `state_dict()`, which gathers, and `load_state_dict()`.

    Returns:
        The same optimizer.

    Raises:
        ShardError: it holds states of a shape that is neither a shard's nor the whole parameter's.

    Example:
        >>> optimizer = whole_states(torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        >>> optimizer.load_state_dict(torch.load("optimizer.pt"))  # doctest: +SKIP
    """
    if optimizer not in _HOLDS_WHOLE:
        cut_held(optimizer)
        optimizer.register_state_dict_post_hook(_gathered)
        optimizer.register_load_state_dict_pre_hook(_cut_given)
        _HOLDS_WHOLE[optimizer] = True
    return optimizer


def full_optimizer_state_dict(
    optimizer: Optimizer, *, rank0_only: bool = False, cpu: bool = False
) -> dict[str, Any]:
    """Gather the whole state dict of an optimizer, one tensor at a time. All ranks must call it.

    Args:
        optimizer: over shards of parameters, whole ones, or both.
        rank0_only: keep the states on rank 0 alone; the other ranks get an empty dict.
        cpu: move each state to the CPU before the next one is gathered.

    Raises:
        ShardError: a state has a shape that is neither a shard's nor the whole parameter's.

    Example:
        >>> states = full_optimizer_state_dict(optimizer, rank0_only=True, cpu=True)  # doctest: +SKIP
        >>> if dist.get_rank() == 0:  # doctest: +SKIP
        ...     torch.save(states, "optimizer.pt")
    """
    with state_dict_mode("local"):
        local = optimizer.state_dict()
    is_kept = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0

    def keep(value: Any) -> Any:
        return value.cpu() if cpu and isinstance(value, Tensor) else value

    found = _with_whole(optimizer, local, keep if is_kept else lambda value: None)
    return found if is_kept else {}


def _gathered(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    if is_local():
        return _with_shards(optimizer, state_dict)
    return _with_whole(optimizer, state_dict, lambda value: value)


def _with_shards(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose states of shards tell torch.distributed.checkpoint what they are."""
    states = dict(state_dict["state"])
    for index, layout, spec in _sharded(optimizer, state_dict):
        if index in states:
            states[index] = {
                key: as_shard_tensor(value, spec, layout)
                if isinstance(value, Tensor) and _is_of_elements(value, key, spec) == "shard"
                else value
                for key, value in states[index].items()
            }
    return {**state_dict, "state": states}


def _with_whole(
    optimizer: Optimizer, state_dict: Mapping[str, Any], keep: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return a state dict with whole states.

    Args:
        optimizer: whose parameters they are of.
        state_dict: what torch returns: states of shards.
        keep: called with each value before the next one is gathered; returns what takes its place.
    """
    states = {index: dict(state) for index, state in state_dict["state"].items()}
    sharded = {index: (layout, spec) for index, layout, spec in _sharded(optimizer, state_dict)}
    owned = _owned(optimizer, state_dict)
    for index in owned:
        states.pop(index, None)
    for index, state in states.items():
        for key, value in state.items():
            if index in sharded and isinstance(value, Tensor):
                value = _gather(value, key, *sharded[index])
            state[key] = keep(value)
    if owned:
        found = _FIND[0](optimizer).states(keep)
        states |= {index: found[id(param)] for index, param in owned.items() if id(param) in found}
    return {**state_dict, "state": states}


def _cut_given(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for index, layout, spec in _sharded(optimizer, state_dict):
        if index in states:
            states[index] = _cut_all(states[index], layout, spec)
    for index, param in _owned(optimizer, state_dict).items():
        if not _FIND[0](optimizer).owns(param):
            states.pop(index, None)
    return {**state_dict, "state": states}


def cut_held(optimizer: Optimizer) -> None:
    """Cut whole states that an optimizer made or loaded before it stepped shards or slices; owners keep theirs."""
    found = divided_by_id()
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if id(param) not in found or not state:
                continue
            layout, spec = found[id(param)]
            owns = _FIND[0](optimizer).owns(param) if _FIND else None
            if owns is None:
                state.update(_cut_all(state, layout, spec))
            elif not owns:
                del optimizer.state[param]


def _owned(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    """Return the parameters that one rank steps for all, by their place in a state dict."""
    if not _FIND:
        return {}
    owns = _FIND[0](optimizer).owns
    return {i: param for i, param in _stepped(optimizer, state_dict) if owns(param) is not None}


def _stepped(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield the parameters of an optimizer, each behind its index in a state dict."""
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        yield from zip(packed["params"], group["params"], strict=False)


def _cut_all(state: Mapping[str, Any], layout: Layout, spec: ParamSpec) -> dict[str, Any]:
    found = dict(state)
    for key, value in state.items():
        if isinstance(value, ShardTensor):
            found[key] = local_of(value, spec, layout)
        elif isinstance(value, Tensor) and _is_of_elements(value, key, spec) == "whole":
            found[key] = cut(value, layout.rank, spec.shard_numel)
    return found


def _gather(value: Tensor, key: str, layout: Layout, spec: ParamSpec) -> Tensor:
    if not isinstance(value, ShardTensor):
        if _is_of_elements(value, key, spec) != "shard":
            return value
        value = as_shard_tensor(value.contiguous(), spec, layout)
    return gather_shard(value, f"{spec.name} ({key} of its optimizer)")


def _is_of_elements(value: Tensor, key: str, spec: ParamSpec) -> str:
    """Say what a state is: "whole", a "shard", or one number, "scalar"."""
    shape = tuple(value.shape)
    if shape == (spec.shard_numel,):
        return "shard"
    if shape == spec.shape:
        return "whole"
    if value.numel() <= 1:
        return "scalar"
    raise ShardError(
        f"the state {key!r} of {spec.name!r} has the shape {shape}; it must be {spec.shape}, as the whole "
        f"parameter, or ({spec.shard_numel},), as this rank's shard: load the states that belong to this model"
    )


def _sharded(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, Layout, ParamSpec]]:
    """Yield index, layout and facts of each shard that an optimizer steps, in its order."""
    found, owned = divided_by_id(), _owned(optimizer, state_dict)
    for index, param in _stepped(optimizer, state_dict):
        if index in owned:
            continue
        if id(param) in found:
            yield index, *found[id(param)]
        elif is_shard(param):
            raise ShardError(
                f"parameter {index} of this optimizer is a shard of a model that has been freed, so its "
                "states cannot be made whole: keep the model as long as its optimizer is saved or loaded"
            )
