"""Turn a model into its shards, in place, and back; refuse what takes a shard for the whole weight while ranks communicate.

A broadcast would make rank 0's shards everybody's, and an average would mix parts of a weight that have nothing to do with
each other, silently. DistributedDataParallel does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from torchloom._torch.distributed import watch_collectives
from torchloom.errors import ShardError
from torchloom.log import get_logger
from torchloom.shard import meta
from torchloom.shard.admit import recomputed
from torchloom.shard.classes import sharded_class
from torchloom.shard.direct_uses import shard_behind
from torchloom.shard.layout import Layout, Mode, ParamSpec, param_of
from torchloom.shard.leaf_modules import Weight, leaves_of, weights_of
from torchloom.shard.parameter import (
    check_node_unhooked,
    hold_part,
    hold_whole,
    is_shard,
    refused_collective,
)
from torchloom.shard.regather import attach
from torchloom.shard.roots import ROOTS, Root, check_shared, is_sharded, layout_of
from torchloom.shard.shards import cut, join, pad_storage
from torchloom.shard.state import COUNTED, ORIGINAL, count_load, gather_whole
from torchloom.shard.writes import WeightCopy

logger = get_logger(__name__)

Broadcast = Callable[[list[Tensor]], None]


def facts_of(model: nn.Module, layout: Layout) -> dict[str, object]:
    """Return what ranks must have in common before they shard a model together, as plain data."""
    order = enumerate(meta.order_of(model, layout))
    return {
        **layout.facts(),
        **{f"weight {index} to be made, those on meta first": name for index, name in order},
    }


def _own_buffers(model: nn.Module, *, leave_files: bool) -> None:
    """Give each element of an expanded buffer a place of its own, as others could not be written.

    Args:
        model: whose buffers they are.
        leave_files: copy buffers that are mapped from a file, too; see `_is_mapped`.
    """
    fresh: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided:
                continue
            pairs = zip(buffer.stride(), buffer.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in pairs):
                module._buffers[name] = fresh.setdefault(id(buffer), buffer.contiguous())
            elif leave_files and _is_mapped(buffer):
                module._buffers[name] = fresh.setdefault(id(buffer), buffer.clone())


def shard_module(
    model: nn.Module,
    layout: Layout,
    *,
    broadcast: Broadcast | None = None,
    init: Callable[[nn.Module], object] | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Keep this rank's shards of the parameters and give the modules gathering properties.

    Parameters stay the same objects under the same names (parameters on the meta device are
    replaced); only their data changes. Memory never exceeds the model as it was plus one whole
    parameter; for a model on meta, the shards plus one module.

    Args:
        model: the model that `layout` was planned for.
        layout: from `plan_layout`.
        broadcast: makes whole tensors equal on all ranks before they are cut, e.g. to those of
            rank 0; None trusts the ranks to have equal models.
        init: fills one module's own parameters, for models on meta; default: its
            `reset_parameters`.
        device: where the shards of parameters on meta are made; default: the CPU.

    Returns:
        The same model.

    Raises:
        ShardError: the model is sharded already, is wrapped, has hooks that would be lost, or is on meta and cannot be initialised.
    """
    if is_sharded(model):
        raise ShardError(
            f"this {type(model).__name__} is already sharded: initialize it once, or call "
            "torchloom.shard.unshard(model) before sharding it again"
        )
    _check_unwrapped(model, layout)
    check_shared(model, layout)
    _check_unhooked(dict(model.named_modules()), layout)
    _forget_computed(model)
    keep = functools.partial(_keep_part, layout=layout, broadcast=broadcast)
    kept: set[str] = set()
    if meta.has_meta(model):
        kept = meta.materialize(
            model, keep, layout=layout, init=init, device=device or torch.device("cpu")
        )
    modules = dict(model.named_modules())
    for spec in layout:
        param = param_of(modules, spec)
        if spec.name not in kept:
            keep(param, spec)
        for owner in spec.owners[1:]:
            modules[owner.module]._parameters[owner.attr] = param
    if layout.sharded:
        watch_wrappers()
    _own_buffers(model, leave_files=layout.stage > 0)
    if broadcast is not None:
        broadcast([b.detach() for b in model.buffers() if b.numel()])
    _swap_classes(modules, layout)
    hooks = attach(model, regather=layout.stage == 3)
    counts_loads = model.register_load_state_dict_post_hook(count_load)
    COUNTED.update(modules.values())
    ROOTS[model] = Root(layout, hooks, (counts_loads,))
    _say_what_happened(layout)
    return model


def unshard(model: nn.Module) -> nn.Module:
    """Gather every parameter and give the modules their own classes back. All ranks must call it.

    Raises:
        ShardError: the model is not sharded, or a hook would be lost.
    """
    layout = layout_of(model)
    modules = dict(model.named_modules())
    for spec in layout.sharded:
        check_node_unhooked(param_of(modules, spec), spec.name)
    for spec in layout.sharded:
        param = param_of(modules, spec)
        whole = gather_whole(param, spec, layout.handle)
        param.grad = None
        hold_whole(param, whole)
    _restore_classes(modules)
    COUNTED.difference_update(modules.values())
    root = ROOTS.pop(model)
    for hook in (*root.hooks, *root.lasting):
        hook.remove()
    return model


def sync_in_backward(model: nn.Module, enabled: bool) -> Layout:
    """Choose where whole parameters of stages 0 and 1 average their gradients.

    Args:
        model: a sharded model.
        enabled: inside the backward pass, every micro-step; otherwise nowhere: the caller averages
            what has accumulated.

    Returns:
        The new layout; parameters and their data are as they were.

    Raises:
        ShardError: forward writes into parameters, which become copies.
    """
    layout = layout_of(model)
    if layout.stage >= 2 or layout.num_ranks == 1:
        return layout
    mode: Mode = "synced" if enabled else "whole"
    layout = replace(layout, params=tuple(replace(spec, mode=mode) for spec in layout))
    modules = dict(model.named_modules())
    _restore_classes(modules)
    _swap_classes(modules, layout)
    ROOTS[model] = replace(ROOTS[model], layout=layout)
    return layout


def _check_unhooked(modules: dict[str, nn.Module], layout: Layout) -> None:
    """Refuse hooks of gradients that would be given a shard of them, or be lost.

    Raises:
        ShardError: a parameter has some, and is about to be cut, or to be made anew.
    """
    for spec in layout:
        param, is_cut = param_of(modules, spec), spec.mode == "sharded"
        has_hooks = param._backward_hooks or param._post_accumulate_grad_hooks
        if has_hooks and (is_cut or param.is_meta):
            would = "see one rank's shard of it, flat" if is_cut else "be lost with its meta device"
            raise ShardError(
                f"the parameter {spec.name!r} has a hook on its gradient, which would {would}: "
                "remove it before the model is sharded, register one that works element by element afterwards (at "
                "dict(model.named_parameters())), or use stage 0 or 1"
            )
        if is_cut or param.is_meta or param.dtype != spec.dtype:
            check_node_unhooked(param, spec.name)


def _check_unwrapped(model: nn.Module, layout: Layout) -> None:
    """Refuse a model that DDP reduces: its hooks expect whole gradients, of parameters that become shards.

    Raises:
        ShardError: the model is wrapped, or holds a wrapped module.
    """
    if not layout.sharded:
        return
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"its module {name!r}" if name else "the model"
            raise ShardError(
                f"{where} is wrapped in DistributedDataParallel, which reduces gradients itself: pass the plain "
                "model (its .module), and under Ray Train leave out ray.train.torch.prepare_model"
            )


def _keep_part(
    param: nn.Parameter, spec: ParamSpec, layout: Layout, broadcast: Broadcast | None
) -> None:
    """Keep this rank's part of a parameter that holds the whole weight."""
    if spec.is_ignored:
        return
    data = param.detach()
    if broadcast is not None:
        data = data.contiguous()
        broadcast([data])
    data = data.to(spec.dtype)
    if spec.mode == "sharded":
        data = cut(data, layout.rank, spec.shard_numel)
    elif spec.is_sliced:
        # Padded, so that every rank's slice is equal and the slices gather in place.
        data = join(pad_storage(data, layout.world_size), spec.shape)
    elif layout.stage > 0 and _is_mapped(data):
        data = data.clone()
    param.grad = None
    hold_part(param, data, spec)


def _is_mapped(data: Tensor) -> bool:
    """Say whether a tensor lies in memory that is not torch's own, such as a file of weights.

    A small weight that stays whole would keep the file, with all weights that are shards by then, in memory; so would a
    buffer, and at stage 1, which copies weights that are sliced, one that is not.
    """
    return not (data.is_meta or data.is_shared() or data.untyped_storage().resizable())


def share_buffers(buffers: Sequence[Tensor], broadcast: Broadcast) -> None:
    """Make buffers those of rank 0, with one message for each dtype; none without floating-point ones.

    Args:
        buffers: of a model, of equal shapes on all ranks.
        broadcast: as for `shard_module`.
    """
    if not any(buffer.is_floating_point() or buffer.is_complex() for buffer in buffers):
        return
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in same])
        broadcast([flat])
        for buffer, values in zip(same, flat.split([b.numel() for b in same]), strict=True):
            buffer.copy_(values.view_as(buffer))


def _forget_computed(model: nn.Module) -> None:
    """Let weights that a hook computes anew in each forward hold no graph of the whole parameters.

    Autograd would go on to expect gradients of the whole shape.
    """
    for module in model.modules():
        for name in recomputed(module):
            module.__dict__[name] = module.__dict__[name].detach()


def _restore_classes(modules: dict[str, nn.Module]) -> None:
    for module in modules.values():
        original = getattr(type(module), ORIGINAL, None)
        if original is not None:
            module.__class__ = original
            del module.__dict__["_loom_names"], module.__dict__["_loom_layout"]
            module.__dict__.pop("_loom_leaf", None)


def _swap_classes(modules: dict[str, nn.Module], layout: Layout) -> None:
    by_module: dict[str, dict[str, ParamSpec]] = {}
    for spec in layout:
        is_plain = spec.mode == "whole" and spec.compute_dtype == spec.dtype
        for owner in spec.owners:
            if not is_plain:
                by_module.setdefault(owner.module, {})[owner.attr] = spec
    leaves: dict[str, list[Weight]] = {}
    for path in leaves_of(modules[""]) if layout.num_ranks > 1 else ():
        if weights := weights_of(path, modules, layout):
            leaves[path] = weights
            by_module.setdefault(path, {})
    for path, specs in by_module.items():
        module = modules[path]
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardError(
                f"module {path!r} is a ScriptModule, whose class cannot be extended: hand over "
                "the Python module that it was scripted from"
            )
        module.__dict__["_loom_names"] = {attr: spec.name for attr, spec in specs.items()}
        module.__dict__["_loom_layout"] = layout
        if path in leaves:
            if "forward" in module.__dict__:
                raise ShardError(
                    f"the leaf module {path!r} has a forward of its own beside that of its class, which would not gather "
                    "its weights: put it into the class"
                )
            module.__dict__["_loom_leaf"] = leaves[path]
        module.__class__ = sharded_class(type(module), specs, layout.handle, is_leaf=path in leaves)


def _say_what_happened(layout: Layout) -> None:
    total = sum(spec.numel for spec in layout)
    logger.info(
        "stage %d over %d ranks: %d of %d parameters sharded, %.1f of %.1f M elements kept here",
        layout.stage,
        layout.world_size,
        len(layout.sharded),
        len(layout.params),
        layout.local_numel / 1e6,
        total / 1e6,
    )
    if layout.stage >= 2 and layout.world_size > 1 and not layout.sharded and layout.rank == 0:
        logger.warning(
            "stage %d shards nothing: all %d parameters are below the persistence threshold; "
            "lower zero_optimization.stage3_param_persistence_threshold",
            layout.stage,
            len(layout.params),
        )


_WRITING = frozenset(["broadcast", "allreduce", "allreduce_coalesced", "reduce", "recv"])


@functools.cache
def watch_wrappers() -> None:
    """Refuse wrappers and collectives of modules that hold shards, from now on, before a parameter is changed."""
    register_module_module_registration_hook(_check_wrapping)
    watch_collectives(_check_collective)


def _check_wrapping(owner: nn.Module, name: str, submodule: nn.Module) -> None:
    if not isinstance(owner, DistributedDataParallel):
        return
    if submodule is not None and any(map(is_shard, submodule.parameters())):
        raise ShardError(
            "DistributedDataParallel was given a model that torchloom has sharded, and would take one rank's shards for "
            "whole weights: leave the wrapper out, as torchloom averages gradients in backward"
        )


def _check_collective(collective: str, tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        shard = each if is_shard(each) else shard_behind(each)
        if shard is not None:
            raise refused_collective(collective, shard)
        if isinstance(each, WeightCopy) and each.param is None and collective in _WRITING:
            raise ShardError(
                f"{collective} would write into a gathered copy of the parameter {each.param_name!r}, and the weight would stay "
                "as it is: leave it out, as torchloom keeps weights equal on all ranks, or write inside "
                "torchloom.shard.gathered(..., modifier_rank=0)"
            )
