"""The sharded models of this process: their layouts, their parameters, and who owns what."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import ShardError
from torchloom.shard.layout import Layout, ParamSpec, param_of
from torchloom.shard.parameter import is_shard
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


def keep_hook(model: nn.Module, hook: RemovableHandle, *, is_for_eager: bool = False) -> None:
    """Remove a hook of a sharded model when the model is made whole again, or compiled if it is for eager code."""
    root = ROOTS[model]
    kind = "hooks" if is_for_eager else "lasting"
    ROOTS[model] = replace(root, **{kind: (*getattr(root, kind), hook)})


def living_layouts() -> list[Layout]:
    """Return the layouts of all sharded models that have not been freed."""
    return [root.layout for root in list(ROOTS.values())]


def forget_model(model: nn.Module) -> None:
    """Leave a sharded model out of what is known of this process: it is never run, as that of a simulation."""
    ROOTS.pop(model, None)


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


class Owners:
    """The parameters of a sharded model, walked through anew only where its modules have changed.

    A walk by `named_parameters` takes a millisecond for a hundred modules, at each step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layout: Layout | None = None
        self._found: dict[str, nn.Parameter] = {}
        self._seen: list[tuple[nn.Module, list[tuple[str, int]]]] = []
        """Modules, and what each held. It is held here, too, so that nothing else can have its id."""

    def __call__(self) -> dict[str, nn.Parameter]:
        """Return what `owners_of` returns.

        Raises:
            ShardError: as `owners_of`.
        """
        layout = layout_of(self._model)
        if (
            layout is not self._layout
            or not self._seen
            or any(_children(module) != known for module, known in self._seen)
        ):
            self._found, self._seen, self._layout = owners_of(self._model), [], layout
            walk = type(self._model)
            if walk.named_parameters is nn.Module.named_parameters:  # else it may yield anything
                self._seen = [(each, _children(each)) for each in self._model.modules()]
        return self._found


def _children(module: nn.Module) -> list[tuple[str, int]]:
    """Return names and ids of a module's submodules and parameters."""
    return [
        (name, id(child))
        for found in (module._modules, module._parameters)
        for name, child in found.items()
    ]


def known_params() -> Iterator[tuple[nn.Parameter, Layout, ParamSpec]]:
    """Yield the parameters of all sharded models, with layout and facts.

    A model whose parameters were changed since is no reason to fail for others.
    """
    for model, root in list(ROOTS.items()):
        for name, param in model.named_parameters():
            if name in root.layout.names:
                yield param, root.layout, root.layout[name]


def divided_by_id() -> dict[int, tuple[Layout, ParamSpec]]:
    """Return layout and facts of all parameters of which each rank steps a part, a shard or a slice, by id."""
    return {id(param): (layout, s) for param, layout, s in known_params() if s.is_divided}


def check_shared(model: nn.Module, layout: Layout) -> None:
    """Refuse parameters that other models own, too, unless they are whole for all of them.

    Raises:
        ShardError: one is a shard already, or would become one under another model's feet.
    """
    modules = dict(model.named_modules())
    params = {spec.name: param_of(modules, spec) for spec in layout}
    for name, param in params.items():
        if is_shard(param):
            raise ShardError(
                f"the parameter {name!r} is a shard already, as another model that owns it was sharded at "
                "stage 2 or 3: one of both can own it; unshard that model first, or give this one a copy"
            )
    cut_here = {id(params[spec.name]): spec.name for spec in layout.sharded}
    shared = _first_shared(cut_here)
    if shared is not None:
        gc.collect()  # models that nobody has any more may wait for it
        shared = _first_shared(cut_here)
    if shared is not None:
        raise ShardError(
            f"the parameter {shared!r} is owned by another model that was sharded, and stage "
            f"{layout.stage} would cut it: at stages 0 and 1 both may own it, or give this one a copy"
        )


def _first_shared(names: dict[int, str]) -> str | None:
    """Return the name of a parameter, given by id, that another sharded model owns."""
    return next((names[id(param)] for param, *_ in known_params() if id(param) in names), None)
