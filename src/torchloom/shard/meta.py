"""Models that are never whole on any rank: built on meta, filled module by module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, Owner, ParamSpec

Keep = Callable[[nn.Parameter, ParamSpec], None]


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models whose parameters and buffers take no memory.

    Example:
        >>> with on_meta():
        ...     model = nn.Linear(1 << 14, 1 << 14)
        >>> model.weight.device
        device(type='meta')
    """
    with torch.device("meta"):
        yield


def has_meta(model: nn.Module) -> bool:
    """Say whether any parameter or buffer of `model` is on the meta device."""
    return any(p.is_meta for p in model.parameters()) or any(b.is_meta for b in model.buffers())


def order_of(model: nn.Module, layout: Layout) -> list[str]:
    """Return the parameters in the order in which they are made equal: those on meta come first.

    Ranks whose models are on meta in different parts would take each other's weights of equal size.
    """
    specs = {owner: spec for spec in layout for owner in spec.owners}
    late = [
        specs[Owner(path, attr)].name
        for path, module in model.named_modules()
        for attr, param in module.named_parameters(recurse=False, remove_duplicate=False)
        if param.is_meta
    ]
    return list(dict.fromkeys([*late, *(spec.name for spec in layout)]))


def materialize(
    model: nn.Module,
    keep: Keep,
    *,
    layout: Layout,
    init: Callable[[nn.Module], object] | None,
    device: torch.device,
) -> set[str]:
    """Give every parameter on meta real data, one module at a time, and keep a part of it.

    A module's own parameters and buffers are made whole, `init(module)` fills them (default: the
    module's `reset_parameters`), and `keep` cuts them before the next module is touched.

    Returns:
        Names of the parameters that were kept.

    Raises:
        ShardError: a module has data on meta and neither `init` nor `reset_parameters`.
    """
    specs = {owner: spec for spec in layout for owner in spec.owners}
    done: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        own = [
            (attr, p)
            for attr, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if p.is_meta
        ]
        buffers = [(k, b) for k, b in module.named_buffers(recurse=False) if b.is_meta]
        if not own and not buffers:
            continue
        reset = getattr(module, "reset_parameters", None)
        fill = reset if init is None else functools.partial(init, module)
        if fill is None:
            raise ShardError(
                f"module {path!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(): pass init=, a function that fills one module's own "
                "parameters and buffers (model._init_weights of a transformers model)"
            )
        for attr, param in own:
            empty = torch.empty(param.shape, dtype=param.dtype, device=device)
            module._parameters[attr] = nn.Parameter(empty, requires_grad=param.requires_grad)
        for key, buffer in buffers:
            module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        with torch.no_grad():
            fill()
        for attr, _ in own:
            spec = specs[Owner(path, attr)]
            fresh = module._parameters[attr]
            assert fresh is not None
            if spec.name in done:
                module._parameters[attr] = done[spec.name]
            else:
                keep(fresh, spec)
                done[spec.name] = fresh
    return set(done)
