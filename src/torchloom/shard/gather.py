"""Whole weights for user code: initialisation, surgery, export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchloom import ops
from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, ParamSpec, param_of
from torchloom.shard.parameter import check_node_unhooked, hold_part, hold_whole
from torchloom.shard.roots import layout_of, root_of
from torchloom.shard.shards import cut
from torchloom.shard.state import ORIGINAL, gather_whole
from torchloom.shard.state import WHOLE as _WHOLE


@contextmanager
def gathered(
    target: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    params: Iterable[nn.Parameter | str] | None = None,
    *,
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Make parameters of a sharded model whole for the length of a `with` block.

    Inside, the chosen parameters hold their full weights and attribute access returns the
    parameter itself, so `nn.init` functions and in-place surgery work. All ranks must enter.

    Args:
        target: the sharded root module, one of its parameters, or several.
        params: with a root module, the parameters or full names to gather; None means all.
        modifier_rank: on exit, keep what this rank made of the weights, on every rank; None
            throws changes away. `load_state_dict` may then run on that rank alone, if the model has no
            buffers in its state dict; otherwise call it on all ranks.

    Raises:
        ShardError: the model is not sharded, a parameter is not one of its own, or a hook would be lost.

    Example:
        >>> with gathered(model.head.parameters(), modifier_rank=0):  # doctest: +SKIP
        ...     nn.init.zeros_(model.head.weight)
    """
    if isinstance(target, nn.Module):
        model = target
    else:
        params = [target] if isinstance(target, Tensor) else list(target)
        model = root_of(params)
    layout = layout_of(model)
    modules = dict(model.named_modules())
    chosen = _not_yet_whole(_choose(layout, modules, params), modules, modifier_rank)
    for spec in chosen:
        if spec.mode == "sharded":
            check_node_unhooked(param_of(modules, spec), spec.name)
    shards: dict[str, Tensor] = {}
    classes = {path: type(module) for path, module in modules.items()}
    _WHOLE.update((id(param_of(modules, spec)), modifier_rank) for spec in chosen)
    for spec in chosen:
        param = param_of(modules, spec)
        shards[spec.name] = param.data
        whole = _whole_of(param, spec, layout)
        hold_whole(param, whole)
    for owner in {owner.module for spec in chosen for owner in spec.owners}:
        module = modules[owner]
        module.__class__ = getattr(type(module), ORIGINAL, type(module))
    try:
        yield
    finally:
        wholes: list[Tensor] = []
        for spec in chosen:  # first all is as it was, as a change may be refused
            param = param_of(modules, spec)
            del _WHOLE[id(param)]
            wholes.append(param.data)
            hold_part(param, shards[spec.name], spec)
        for path, module in modules.items():
            module.__class__ = classes[path]
        if modifier_rank is not None:
            for spec, whole in zip(chosen, wholes, strict=True):
                _check_shape(whole, spec)
            for spec, whole in zip(chosen, wholes, strict=True):
                _write_back(param_of(modules, spec), whole, spec, layout, modifier_rank)


def _not_yet_whole(
    chosen: list[ParamSpec], modules: dict[str, nn.Module], modifier_rank: int | None
) -> list[ParamSpec]:
    """Return those to gather: not those that an outer block has, which keeps or drops their changes."""
    fresh = []
    for spec in chosen:
        param = param_of(modules, spec)
        if spec.is_ignored:
            continue
        if id(param) not in _WHOLE:
            fresh.append(spec)
        elif modifier_rank not in (None, _WHOLE[id(param)]):
            raise ShardError(
                f"parameter {spec.name!r} is gathered by an outer gathered() block with "
                f"modifier_rank={_WHOLE[id(param)]}, which would throw changes of "
                f"modifier_rank={modifier_rank} away: pass the same modifier_rank to both"
            )
    return fresh


def _choose(
    layout: Layout, modules: dict[str, nn.Module], params: Iterable[nn.Parameter | str] | None
) -> list[ParamSpec]:
    if params is None:
        return list(layout)
    by_id = {id(param_of(modules, spec)): spec for spec in layout}
    by_name = {spec.name: spec for spec in layout}
    chosen: dict[str, ParamSpec] = {}
    for param in params:
        spec = by_name.get(param) if isinstance(param, str) else by_id.get(id(param))
        if spec is None:
            what = repr(param) if isinstance(param, str) else f"of shape {tuple(param.shape)}"
            raise ShardError(
                f"gathered() was given a parameter {what} that this model does not own: pass "
                "parameters of the sharded model or their full names"
            )
        chosen[spec.name] = spec
    # A module whose class is swapped back shows all of its parameters: gather its others, too.
    touched = {owner.module for spec in chosen.values() for owner in spec.owners}
    for spec in layout:
        if any(owner.module in touched for owner in spec.owners):
            chosen.setdefault(spec.name, spec)
    return list(chosen.values())


def _whole_of(param: nn.Parameter, spec: ParamSpec, layout: Layout) -> Tensor:
    if spec.mode == "sharded":
        return gather_whole(param, spec, layout.handle)
    return param.data.clone()  # or changes would stay without a modifier_rank


def _check_shape(whole: Tensor, spec: ParamSpec) -> None:
    if tuple(whole.shape) != spec.shape:
        raise ShardError(
            f"parameter {spec.name!r} left gathered() with shape {tuple(whole.shape)}, it had "
            f"{spec.shape}: change values, not shapes"
        )


def _write_back(
    param: nn.Parameter, whole: Tensor, spec: ParamSpec, layout: Layout, modifier_rank: int
) -> None:
    whole = whole.to(spec.dtype).contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        ops.broadcast_(whole, modifier_rank, layout.handle, spec.name)
    with torch.no_grad():
        if spec.mode == "sharded":
            # Through detach(), not .data: torch counts the write, by which gathered copies of the
            # weight are known to be out of date.
            param.detach().copy_(cut(whole, layout.rank, spec.shard_numel))
        else:
            param.detach().copy_(whole)
