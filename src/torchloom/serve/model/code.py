"""Digests of the code that values bring with them: functions, and the methods of classes.

Files stand for most code that a program was traced from (`model.fingerprint`). A digest finds what no file shows:
classes and functions that were patched, and code of notebooks. Names of files, numbers of lines and comments do not
enter it. The versions of torch and Python stand for their code, unless somebody replaced it.
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
        self._own: dict[type, str] = {}
        self.seen: set[types.CodeType] = set()
        """The code that was read, with what is defined inside of it."""
        self.modules: set[str] = set()
        """The modules of the classes and functions that were read."""

    def words(self, value: Any) -> str:
        """Return a digest of the code of a function, a class or what wraps one; nothing of what has none."""
        found = [self._class(value)] if isinstance(value, type) else []
        found += [self._function(each, ()) for each in functions_in(value)]
        text = "; ".join(filter(None, found))
        return f", code {_hash(text)}" if text else ""

    def _class(self, kind: type) -> str:
        kinds = [*kind.__mro__, *type(kind).__mro__]
        for each in kinds:
            if each not in self._own:
                self._own[each] = self._methods(each)
        owns = [self._own[each] for each in kinds]
        return " ".join([*map(name_of, kinds), *owns]) if any(owns) else ""

    def _methods(self, kind: type) -> str:
        """Return what a class itself defines; of torch's only what calls go through and somebody replaced.

        Libraries add methods of their own to torch's classes, in some processes and not in others.
        """
        self.modules.add(kind.__module__)
        is_torchs = kind.__module__.partition(".")[0] == "torch"
        parts = [
            f"{name} {text}"
            for name, value in sorted(vars(kind).items())
            if not is_torchs or name in _CALLED or name.startswith("__")
            for function in functions_in(value)
            if (text := self._function(function, ()))
        ]
        return "; ".join(parts)

    def _function(
        self, function: types.FunctionType, within: tuple[types.FunctionType, ...]
    ) -> str:
        """Return the digests of a function, its defaults, and the functions in its cells.

        Torch's own, such as what `torch.compiler.disable` returns, count for what they wrap alone.
        """
        if function in within:
            return ""
        is_own = not has_version(function.__code__.co_filename)
        parts = []
        if is_own:
            self.seen.update(nested(function.__code__))
            self.modules.add(function.__module__ or "")
            given = (function.__defaults__, function.__kwdefaults__)
            parts.append(f"{code_digest(function.__code__)} {words_for(given)}")
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not filled yet
            inner = list(functions_in(content))
            parts += [self._function(each, (*within, function)) for each in inner]
            if is_own and not inner:
                parts.append(words_for(content))
        return " ".join(filter(None, parts))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
