"""Digests of the code that values bring with them: functions, and the methods of classes.

Files stand for the code that a program was traced from (`model.fingerprint`). A digest finds what no file shows: methods and
functions that somebody replaced. Names of files, numbers of lines and comments do not enter it, nor do the cells of
functions. The versions of torch and Python stand for their code, unless somebody replaced it.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

from torchloom.bytecode import code_digest, nested
from torchloom.serve.model.spelling import name_of, words_for

_TORCH = torch.__path__[0]
_CALLED = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
"""Of torch's classes: what a call goes through besides methods of Python's protocols."""
_PYTHON = sysconfig.get_path("stdlib")
_ADDED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


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


def has_version(path: str) -> bool:
    """Return whether a file is torch's or Python's, whose versions are part of each key."""
    if path.startswith((_TORCH, "<frozen ")):
        return True
    return path.startswith(_PYTHON) and not path.startswith(_ADDED)


def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package, torch among them."""
    return path.startswith((_TORCH, *_ADDED))


class CodeReader:
    """Digests code; each class once, so a reader is for one comparison."""

    def __init__(self) -> None:
        self._of_classes: dict[type, str] = {}
        self.seen: set[types.CodeType] = set()
        """The code that was read, with what is defined inside of it."""
        self.modules: set[str] = set()
        """The modules of the classes and functions that were read."""

    def words(self, value: Any) -> str:
        """Return a digest of the code of a function, a class or what wraps one; nothing of what has none."""
        kinds = value.__mro__ if isinstance(value, type) else ()
        parts = [*map(self._methods, kinds), *map(self._function, functions_in(value))]
        if not any(parts):
            return ""
        text = " ".join([*map(name_of, kinds), *parts])
        return f", code {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def _methods(self, kind: type) -> str:
        """Return what a class itself defines; of torch's only what calls go through and somebody replaced.

        Libraries add methods of their own to torch's classes, in some processes and not in others.
        """
        if kind not in self._of_classes:
            self.modules.add(kind.__module__)
            is_torchs = kind.__module__.partition(".")[0] == "torch"
            self._of_classes[kind] = "; ".join(
                f"{name} {text}"
                for name, value in sorted(vars(kind).items())
                if not is_torchs or name in _CALLED or name.startswith("__")
                for function in functions_in(value)
                if (text := self._function(function))
            )
        return self._of_classes[kind]

    def _function(self, function: types.FunctionType) -> str:
        if has_version(function.__code__.co_filename):
            return ""
        self.seen.update(nested(function.__code__))
        self.modules.add(function.__module__ or "")
        given = words_for((function.__defaults__, function.__kwdefaults__))
        return f"{code_digest(function.__code__)} {given}"
