"""Copies a changed class of a wrapper to the module behind it.

`torch.nn.utils.parametrize` replaces a module's class by a subclass whose properties compute the parameters. A
wrapper and its module share attributes but not their class, and the module is what runs: a class that is set on
the wrapper has to be set on the module as well.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_MARK = "_loom_follows"
_OWN = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__"}
    | {_MARK}
)


def follow_class(wrapper: Any, module: nn.Module) -> None:
    """Give a module the properties of its wrapper's present class, in a subclass of the module's own.

    Args:
        wrapper: an instance of a generated class, which has `_loom_base` among its attributes, or of
            a subclass.
        module: the module that it wraps.
    """
    kinds = type(wrapper).__mro__
    index = next(at for at, kind in enumerate(kinds) if "_loom_base" in vars(kind))
    base, added = kinds[index]._loom_base, kinds[:index]
    if type(module) is not base and _MARK not in vars(type(module)):
        return  # the module itself was given another class
    if not added:
        module.__class__ = base
        return
    wanted: dict[str, Any] = {}
    for kind in reversed(added):
        wanted |= {name: value for name, value in vars(kind).items() if name not in _OWN}
    if not hasattr(base, "__deepcopy__"):
        wanted.setdefault("__deepcopy__", _deepcopy)  # torch's class has one, unless its base had
    if type(module) is base:
        body = {"__module__": base.__module__, _MARK: True}
        module.__class__ = type(added[0].__name__, (base,), body)
    twin = type(module)
    for name in vars(twin).keys() - wanted.keys() - _OWN:
        delattr(twin, name)
    for name, value in wanted.items():
        if vars(twin).get(name) is not value:
            setattr(twin, name, value)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a module whose class cannot be pickled."""
    twin = memo[id(self)] = self.__class__.__new__(self.__class__)
    twin.__dict__ = copy.deepcopy(self.__dict__, memo)
    return twin
