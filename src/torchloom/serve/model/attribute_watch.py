"""Notice that an attribute of a module is set, without a check in each call.

Each module gets a subclass of its own class that overrides `__setattr__`, `__delattr__`, and the methods of torch's
that bypass these (`register_buffer`, `ModuleList.append`). What is not set through a module (an entry of a config
object, a list that is appended to) is not noticed here; `Program.changed` compares that too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

NOTE = "_torchloom_note"
_SETTERS = (
    *("add_module", "register_module", "register_buffer", "register_parameter"),
    *(
        "__setitem__",
        "__delitem__",
        "append",
        "extend",
        "insert",
        "pop",
        "popitem",
        "clear",
        "update",
    ),
    *("setdefault", "__iadd__", "__ior__"),
)
_made: dict[type, type] = {}


def watch_attributes(module: nn.Module, note: Callable[[], None]) -> None:
    """Call `note` whenever an attribute of a module or of one inside it is set or deleted."""
    for each in module.modules():
        each.__dict__[NOTE] = note
        if type(each) not in _made.values():
            each.__class__ = _watched(type(each))


def unwatch_attributes(module: nn.Module) -> None:
    """Give modules their own classes back."""
    for each in module.modules():
        each.__dict__.pop(NOTE, None)
        own = getattr(type(each), "_torchloom_own", None)
        if own is not None:
            each.__class__ = own


def own_class(kind: type) -> type:
    """Return the class that a watched module had before; any other class as it is."""
    own: type = vars(kind).get("_torchloom_own", kind)
    return own


def _watched(own: type) -> type:
    if own in _made:
        return _made[own]
    base: Any = own

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        _noted(self)

    def __delattr__(self: nn.Module, name: str) -> None:
        base.__delattr__(self, name)
        _noted(self)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        """Copies and pickles are of the module's own class."""
        state = {name: value for name, value in self.__dict__.items() if name != NOTE}
        return _blank, (own,), state

    names = {
        **{
            name: _noting(each) for name in _SETTERS if _is_torchs(each := getattr(own, name, None))
        },
        "__setattr__": __setattr__,
        "__delattr__": __delattr__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "_torchloom_own": own,
    }
    _made[own] = type(own.__name__, (own,), names)
    return _made[own]


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("torch.nn.")


def _noting(function: Any) -> Callable[..., Any]:
    """Return a method that does the same, and notes it."""

    @functools.wraps(function)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        finally:
            _noted(self)

    return noting


def _blank(own: Any) -> nn.Module:
    """Return a module without attributes, which unpickling gives it next."""
    return own.__new__(own)


def _noted(module: nn.Module) -> None:
    note = module.__dict__.get(NOTE)
    if note is not None:
        note()
