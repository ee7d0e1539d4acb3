"""The sharded models of this process: their layouts, their parameters, and who owns what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.shards import shard_numel_of
from torchloom.shard.state import ORIGINAL


@dataclass(frozen=True)
class Root:
    """What is kept of one sharded model beside its parameters."""

    layout: Layout
    hooks: tuple[RemovableHandle, ...]
    """Around eager forward passes."""
    lasting: tuple[RemovableHandle, ...]
    """Hooks that compiled code needs as well; all go when the model is whole again."""


ROOTS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a sharded model.

    Raises:
        ShardError: the model is not sharded.
    """
    root = ROOTS.get(model)
    if root is None:
        raise ShardError(
            f"this {type(model).__name__} is not sharded: call torchloom.initialize or "
            "torchloom.shard_model first, and hand over the same module"
        )
    return root.layout


def sharded_models() -> list[nn.Module]:
    """Return all sharded models that have not been freed."""
    return list(ROOTS.keys())


def divided_models() -> list[tuple[nn.Module, Layout]]:
    """Return the sharded models of which ranks keep other parts, or get other gradients, with their layouts."""
    return [(model, root.layout) for model, root in ROOTS.items() if root.layout.is_divided]


def keep_hook(model: nn.Module, hook: RemovableHandle) -> None:
    """Remove a hook of a sharded model when the model is made whole again."""
    root = ROOTS[model]
    ROOTS[model] = replace(root, lasting=(*root.lasting, hook))


def living_layouts() -> list[Layout]:
    """Return the layouts of all sharded models that have not been freed."""
    return [root.layout for root in ROOTS.values()]


def root_of(params: Sequence[nn.Parameter | str]) -> nn.Module:
    """Return the sharded model that owns the first of `params`.

    Raises:
        ShardError: no sharded model owns it.
    """
    for model in list(ROOTS.keys()):
        if params and any(param is params[0] for param in model.parameters()):
            return model
    if params and not isinstance(params[0], (nn.Parameter, str)):
        raise ShardError(
            "gathered was given a plain tensor: module.weight of a sharded model is the gathered weight itself. Pass "
            "module.parameters(), or the model and names: gathered(model, ['0.weight'])"
        )
    raise ShardError(
        "no sharded model owns these parameters: pass parameters of a model that "
        "torchloom.initialize or torchloom.shard_model has sharded"
    )


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was sharded."""
    return getattr(type(module), ORIGINAL, type(module))


def is_sharded(model: nn.Module) -> bool:
    """Say whether `model`, or a part of it, has been sharded."""
    return any(hasattr(type(module), ORIGINAL) for module in model.modules()) or model in ROOTS


def detach_hooks(model: nn.Module) -> None:
    """Remove the brackets around eager forward passes, which compiled code does not need."""
    for hook in ROOTS[model].hooks if model in ROOTS else ():
        hook.remove()


def owners_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a sharded model by the names of its layout.

    Raises:
        ShardError: the model is not sharded, or its parameters are no longer those of the layout.
    """
    layout = layout_of(model)
    found = dict(model.named_parameters())
    expected = layout.names
    if found.keys() != expected:
        added, gone = sorted(found.keys() - expected), sorted(expected - found.keys())
        what = f"added: {', '.join(added[:3])}" if added else f"removed: {', '.join(gone[:3])}"
        raise ShardError(
            f"the model's parameters changed after it was sharded ({what}): change the model "
            "before torchloom.initialize, or unshard it, change it and initialize again"
        )
    return found


def divided_by_id() -> dict[int, tuple[Layout, ParamSpec]]:
    """Return layout and facts of all parameters of which each rank steps a part, by id.

    Those that hold a shard, and whole ones that are stepped in slices (stage 1): `shard_numel` is then the size of
    the slice.
    """
    found: dict[int, tuple[Layout, ParamSpec]] = {}
    for model in sharded_models():
        layout, params = layout_of(model), dict(model.named_parameters())
        for spec in layout:  # one that was changed since is no reason to fail for others
            if spec.name in params and (spec.is_sliced or spec.mode == "sharded"):
                numel = shard_numel_of(spec.numel, layout.world_size)
                found[id(params[spec.name])] = (layout, replace(spec, shard_numel=numel))
    return found
