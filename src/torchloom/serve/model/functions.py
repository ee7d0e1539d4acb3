"""The Python functions behind a value, and whether the versions of torch or Python stand for their code."""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions that a value is, wraps, or is made of."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        for each in (value.fget, value.fset):
            yield from functions_in(each)
    elif isinstance(value, (functools.cached_property, functools.partial, functools.partialmethod)):
        yield from functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from functions_in(value.__wrapped__)


_STANDARD = (torch.__path__[0], sysconfig.get_path("stdlib"))
_ADDED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def has_version(code: types.CodeType) -> bool:
    """Return whether the version of torch or Python, which are part of a key, stands for code."""
    path = code.co_filename
    if path.startswith((_STANDARD[0], "<frozen ")):
        return True
    return path.startswith(_STANDARD[1]) and not path.startswith(_ADDED)
