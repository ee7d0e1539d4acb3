"""State dicts of sharded modules: whole weights by default, shards on request.

`model.state_dict()` of a sharded model has the names and shapes of the model before sharding. It
gathers, so all ranks must call it. Inside `state_dict_mode("local")` it returns this rank's shards
and communicates nothing. `load_state_dict` takes either.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchloom import ops
from torchloom._torch.subclasses import as_plain_tensors
from torchloom.position import POSITION
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.parameter import local_shard
from torchloom.shard.shard_tensor import ShardTensor, as_shard_tensor, local_of
from torchloom.shard.shards import cut
from torchloom.shard.writes import weight_copy

ORIGINAL = "_loom_original_class"
"""Class attribute of a generated class: the class that it was made from."""

StateDictMode = Literal["full", "local"]

_PURPOSE = "for whole weights"
_mode: ContextVar[StateDictMode] = ContextVar("state_dict_mode", default="full")


def is_local() -> bool:
    """Say whether state dicts hold shards now."""
    return _mode.get() == "local"


@contextmanager
def state_dict_mode(mode: StateDictMode) -> Iterator[None]:
    """Choose what `state_dict()` returns in a `with` block: "full" weights or "local" shards."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def full_state_dict(
    model: nn.Module,
    *,
    rank0_only: bool = False,
    cpu: bool = False,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Gather the whole state dict, one parameter at a time. All ranks must call it.

    Args:
        model: a sharded model, or a submodule of one.
        rank0_only: keep the weights on rank 0 alone; the other ranks get an empty dict.
        cpu: move each weight to the CPU before the next one is gathered.
        only: names to keep, equal on all ranks; default: all.
    """
    keep = not (rank0_only and dist.is_initialized() and dist.get_rank() != 0)
    found: dict[str, Tensor] = {}
    first_keys: dict[int, str] = {}
    for key, value in sharded_state_dict(model).items():
        if only is not None and key not in only:
            continue
        if isinstance(value, ShardTensor):
            first = first_keys.setdefault(value.local.data_ptr(), key)
            if first != key:  # tied weights are one tensor
                if keep:
                    found[key] = found[first]
                continue
            with POSITION.gathering(_PURPOSE):
                value = gather_shard(value, key)
        if keep:
            found[key] = value.cpu() if cpu and isinstance(value, Tensor) else value
    return found


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards under the model's names; communicates nothing.

    They are `ShardTensor`s, which share memory with the model. `torch.distributed.checkpoint` saves them as
    whole tensors and loads into them.

    Example:
        >>> dcp.save({"model": sharded_state_dict(model)}, checkpoint_id="run/5")  # doctest: +SKIP
        >>> dcp.load({"model": sharded_state_dict(model)}, checkpoint_id="run/5")  # doctest: +SKIP
    """
    with state_dict_mode("local"):
        return dict(model.state_dict())


def save_to_state_dict(
    self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Stand in for `nn.Module._save_to_state_dict` in generated classes."""
    getattr(type(self), ORIGINAL)._save_to_state_dict(self, destination, prefix, keep_vars)
    layout = self._loom_layout
    if is_local():
        for attr, name in self._loom_names.items():
            if layout[name].mode == "sharded" and not keep_vars:
                shard = local_shard(destination[prefix + attr])
                destination[prefix + attr] = as_shard_tensor(shard, layout[name], layout)
        return
    gathered: Any = {}
    if isinstance(destination, OrderedDict):  # a plain dict has no weak references
        gathered = _GATHERED.setdefault(destination, weakref.WeakValueDictionary())
    for attr, name in self._loom_names.items():
        if layout[name].mode == "sharded":
            whole = gathered.get((layout.handle, name))
            if whole is None:
                whole = _kept_copy(self, self._parameters[attr], layout, name)
                gathered[layout.handle, name] = whole
            destination[prefix + attr] = whole


def _kept_copy(module: nn.Module, param: Tensor, layout: Layout, name: str) -> Tensor:
    """Return a gathered weight whose writes reach the shard, as those into a whole model's state dict reach its weights."""
    spec = layout[name]
    whole = gather_whole(param, spec, layout.handle)

    def keep() -> None:
        local_shard(param).copy_(cut(whole, layout.rank, spec.shard_numel))
        count_load(module)

    return weight_copy(whole, None, name, keep=keep)


_GATHERED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What each state dict that is being written holds by now, by communicator and name: tied weights, and modules
that have several names, are one tensor in it, as in the state dict of a model that is not sharded."""

COUNTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose loads ranks compare: those that were sharded, not copies, which a rank may have alone."""


def count_load(module: nn.Module, *_: object) -> None:
    """Let ranks compare that weights were loaded: on one rank alone they would no longer be equal."""
    if module in COUNTED and not _is_taken_from_one_rank(module):
        POSITION.loads += 1


WHOLE: dict[int, int | None] = {}
"""Parameters that a `gathered` block has made whole, by their id, and the rank whose changes it keeps."""


def _is_taken_from_one_rank(module: nn.Module) -> bool:
    """Say whether all that a load writes into a module is of one rank once a `gathered` block ends."""
    if not all(WHOLE.get(id(each)) is not None for each in module.parameters()):
        return False  # a state dict would gather
    return all(id(each) in WHOLE for each in module.state_dict(keep_vars=True).values())


def load_from_state_dict(
    self: Any,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *args: Any,
) -> None:
    """Stand in for `nn.Module._load_from_state_dict` in generated classes: cuts whole weights."""
    layout = self._loom_layout
    count_load(self)
    cut_dict = dict(state_dict)
    for attr, name in self._loom_names.items():
        value, spec = state_dict.get(prefix + attr), layout[name]
        if isinstance(value, ShardTensor):
            cut_dict[prefix + attr] = local_of(value, spec, layout)
        elif spec.mode == "sharded" and value is not None and tuple(value.shape) == spec.shape:
            cut_dict[prefix + attr] = cut(value, layout.rank, spec.shard_numel)
    # Assigning would put new Parameter objects in place of those that the optimizer holds.
    local_metadata = {**local_metadata, "assign_to_params_buffers": False}
    original = getattr(type(self), ORIGINAL)
    with as_plain_tensors():
        original._load_from_state_dict(self, cut_dict, prefix, local_metadata, *args)


def gather_whole(shard: Tensor, spec: ParamSpec, handle: str) -> Tensor:
    """Return the whole weight of which all ranks hold a shard, in the dtype it is kept in.

    Args:
        shard: this rank's.
        spec: of the parameter.
        handle: of the communicator.
    """
    with torch.no_grad(), POSITION.gathering(_PURPOSE):
        return ops.gather(
            shard.detach(), list(spec.shape), spec.dtype, spec.wire_dtype, handle, spec.name
        )


def gather_shard(shard: ShardTensor, name: str) -> Tensor:
    """Return the whole tensor of which a state dict of shards holds this rank's. All ranks must call.

    Args:
        shard: from `sharded_state_dict`.
        name: what ranks compare.
    """
    with torch.no_grad():
        return ops.gather(
            shard.local, list(shard.shape), shard.dtype, shard.dtype, shard.handle, name
        )
