"""Hooks: has the model got others since its program was made?

Each call compares one number, the one that torch gives to the next hook of the process. Where it has grown, somebody has
registered a hook somewhere: `ModelLooks` then compares all hooks of the model, and the dtypes, sizes and strides of its
tensors, with what they were. (Weights are compared before they reach a graph by `call.weight_checks`, tied names by
`call.tied_names`.)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)
OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Attributes of each module that hold its tensors and parts."""
_GLOBAL_HOOKS = tuple(
    f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward")
)


def next_hook() -> int:
    """Return the number of the next hook that anybody registers in this process."""
    return RemovableHandle.next_id


class ModelLooks:
    """What a model looked like when its program was made.

    Args:
        module: the model, None for a plain function.
        structure: of its tensors.
    """

    def __init__(self, module: nn.Module | None, structure: Mapping[str, str]) -> None:
        self._module = module
        self._structure = _without_grad(structure)
        self._hooks = _hooks_of(module)

    def changed(self, structure: Mapping[str, str]) -> list[str]:
        """Say what is another thing now, one line each.

        Args:
            structure: of its tensors now.
        """
        there = _without_grad(structure)
        lines = [
            f"{name} was {was}, is {there.get(name, 'gone')}"
            for name, was in self._structure.items()
            if there.get(name) != was
        ]
        now = _hooks_of(self._module)
        return lines + [
            f"{place} are other hooks than when it was compiled"
            for place in dict.fromkeys([*self._hooks, *now])
            if self._hooks.get(place) != now.get(place)
        ]


def _without_grad(structure: Mapping[str, str]) -> dict[str, str]:
    """Return what tensors look like; whether they require gradients is asked elsewhere where it matters."""
    return {name: text.replace(", requires grad", "") for name, text in structure.items()}


def _hooks_of(module: nn.Module | None) -> dict[str, tuple[int, ...]]:
    shared = nn.modules.module
    found = {name: tuple(getattr(shared, name)) for name in _GLOBAL_HOOKS}
    if module is not None:
        for path, each in module.named_modules():
            for name in HOOKS:
                found[f"{path}.{name}".lstrip(".")] = tuple(getattr(each, name, ()))
    return {place: keys for place, keys in found.items() if keys}
