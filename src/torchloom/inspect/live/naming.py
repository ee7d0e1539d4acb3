"""The name of a callable and where it is defined, without running code of its class.

A class may run code of its own in `__getattr__`, so names are read from types and from Python's own routines.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

from torch import nn

from torchloom._torch import introspect

_ROUTINES = (
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
"""Callables of Python itself: they run no code of the program when they are asked for a name."""


class Named(NamedTuple):
    """A callable that torch compiles through a wrapper function of its own: a partial, a callable object, a
    module of torch.nn."""

    name: str
    file: str
    line: int


def name_of(fn: Any) -> str:
    """Return a name for a callable that is no plain function, without running code of its class.

    Example:
        >>> name_of(functools.partial(name_of, 3))
        'partial(name_of)'
    """
    if _is_a(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    if _is_a(fn, BuiltinFunctionType):
        name = fn.__name__
    elif _is_a(fn, type):
        name = type.__getattribute__(fn, "__qualname__")
    elif _is_a(fn, *_ROUTINES):
        name = fn.__qualname__
    else:
        name = inspect.getattr_static(fn, "__qualname__", None)
    return name if _is_a(name, str) else type(fn).__qualname__


def short_name(name: str) -> str:
    """Return a qualified name without the functions around it.

    Example:
        >>> short_name("partial(build.<locals>.Block.forward)")
        'partial(Block.forward)'
    """
    return re.sub(r"[\w.<>]*<locals>\.", "", name)


def named(fn: Any) -> Named:
    """Return name, file and line of a callable that is no plain function, without running code of its class."""
    inner = fn
    while _is_a(inner, functools.partial):
        inner = inner.func
    name = name_of(fn)
    if _is_a(inner, nn.Module):
        inner = inspect.getattr_static(type(inner), "forward", None)
        name = f"{name}.forward"
    elif not _is_a(inner, *_ROUTINES):
        inner = inspect.getattr_static(type(inner), "__call__", None)
    inner = inner.__func__ if _is_a(inner, MethodType) else inner
    inner = introspect.innermost(inner) if _is_a(inner, FunctionType) else None
    code = getattr(inner, "__code__", None)
    return Named(name, *(("", 0) if code is None else introspect.place_of(code)))


def _is_a(value: Any, *types: type) -> bool:
    """Return whether a value is of one of some types: `isinstance` would ask the value for its class."""
    return issubclass(type(value), types)
