"""Digests of the code that a value brings with it: its functions, the methods of its class, what these hold."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchloom.bytecode import code_digest, nested
from torchloom.serve.model.functions import functions_in, has_version
from torchloom.serve.model.spelling import NotExactError, exact, name_of, words_for

_INERT = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "del", "repr", "str", "doc", "format", "sizeof", "dir", "module", "dict"),
        *("weakref", "reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy", "slots"),
        *("init_subclass", "annotations", "orig_bases", "parameters", "qualname"),
        *(
            "firstlineno",
            "static_attributes",
            "match_args",
            "annotate",
            "annotations_cache",
            "annotate_func",
        ),
        *("dataclass_fields", "dataclass_params", "abstractmethods"),
    )
)
"""Of a class: what does not take part in a call of its objects."""
_CALLED = frozenset({"_call_impl", "_wrapped_call_impl"})
"""Of torch's modules: what a call goes through and no trace shows."""
_UNTRACED = (enum.Enum,)
"""Classes whose methods between single underscores are called and not traced."""


@dataclass
class Reader:
    """Reads code by the names of what was traced.

    Args:
        names: under which classes hold traced functions.
    """

    names: frozenset[str]
    seen: set[types.CodeType] = field(default_factory=set)
    """The code that was read, with what is defined inside of it."""
    files: dict[str, str] = field(default_factory=dict)
    """Where each label is from, for people."""
    _classes: dict[type, dict[str, str]] = field(default_factory=dict)
    _parts: dict[type, frozenset[str]] = field(default_factory=dict)

    def read(self, value: Any) -> dict[str, str]:
        """Return digests of the code that a value brings with it, by labels; of an object its class's."""
        found: dict[str, str] = {}
        for each in functions_in(value):
            _join(found, self._function(each, ()))
        kind = value if isinstance(value, type) else type(value)
        return found | self.read_class(kind)

    def read_class(self, kind: type) -> dict[str, str]:
        """Return digests of the methods of a class that take part in calls, inherited ones included."""
        if kind not in self._classes:
            self._classes[kind] = self._read_class(kind)
        return self._classes[kind]

    def _read_class(self, kind: type) -> dict[str, str]:
        if kind.__module__ == "builtins" or kind in (nn.Module, types.ModuleType):
            return {}
        found = {}
        lineage = [each for each in kind.__mro__ if each is not object]
        if any(not _is_torchs(each) for each in lineage):
            label = f"{kind.__qualname__}.__mro__"
            found[label] = " ".join(map(name_of, lineage))
            self.files.setdefault(label, _file_of(kind))
        found |= self._read_metaclass(type(kind))
        for each in lineage:
            for name, value in list(vars(each).items()):
                is_dunder = name.startswith("__") and name.endswith("__")
                if name not in self.names and name not in self._taking_part(each):
                    continue
                label = f"{each.__qualname__}.{name}"
                functions = list(functions_in(value))
                for function in functions:
                    _join(found, self._function(function, (), label))
                if not functions and not is_dunder:
                    found[label] = words_for(value)
                    self.files.setdefault(label, _file_of(each))
        return found

    def _taking_part(self, kind: type) -> frozenset[str]:
        """Return the names of a class's methods that a call may go through without a trace of it."""
        if kind not in self._parts:
            is_torchs = _is_torchs(kind)
            self._parts[kind] = frozenset(
                name
                for name, value in list(vars(kind).items())
                if _may_be_called(kind, name) and (not is_torchs or _is_replaced(value))
            )
        return self._parts[kind]

    def _read_metaclass(self, kind: type) -> dict[str, str]:
        """Return what a metaclass of the user's holds: Dynamo reads it without a guard."""
        found: dict[str, str] = {}
        for each in kind.__mro__:
            for name, value in () if _is_torchs(each) else list(vars(each).items()):
                label = f"{each.__qualname__}.{name}"
                functions = list(functions_in(value))
                for function in functions:
                    _join(found, self._function(function, (), label))
                if not functions and not name.startswith("__"):
                    found[label] = words_for(value)
                    self.files.setdefault(label, _file_of(each))
        return found

    def _function(
        self, function: types.FunctionType, within: tuple[types.CodeType, ...], label: str = ""
    ) -> dict[str, str]:
        """Return the digest of a function's code, of its defaults, and of functions in its cells."""
        code = function.__code__
        if code in within:
            return {}
        label = label or function.__qualname__
        self.files.setdefault(label, code.co_filename)
        self.seen.update(nested(code))
        found = {label: f"{code_digest(code)} {_defaults(function)}"}
        if not has_version(code):
            found[f"{label}, builtins"] = _not_guarded(code, function.__globals__)
            self.files.setdefault(f"{label}, builtins", code.co_filename)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not filled yet
            inner = list(functions_in(content))
            for each in inner:
                _join(found, self._function(each, (*within, code), f"{label}, {name}"))
            if not inner:
                found[f"{label}, {name}"] = words_for(content)
                self.files.setdefault(f"{label}, {name}", code.co_filename)
        return found


def _may_be_called(kind: type, name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return name not in _INERT
    is_between = name.startswith("_") and name.endswith("_") and issubclass(kind, _UNTRACED)
    return name in _CALLED or is_between


def _is_replaced(value: Any) -> bool:
    """Return whether a method of torch's is somebody else's."""
    return any(not has_version(function.__code__) for function in functions_in(value))


def _join(found: dict[str, str], more: Mapping[str, str]) -> None:
    """Add digests; of two codes of one name, such as the two functions of a property, both."""
    for label, digest in more.items():
        name = label
        while found.get(name, digest) != digest:
            name += "'"
        found[name] = digest


def _defaults(function: types.FunctionType) -> str:
    given = (function.__defaults__, function.__kwdefaults__)
    if given == (None, None):
        return ""
    try:
        return hashlib.blake2b(exact(given).encode(), digest_size=8).hexdigest()
    except NotExactError:
        return words_for(given)


def _not_guarded(code: types.CodeType, scope: Mapping[str, Any]) -> str:
    """Return what Dynamo does not guard of globals: names that are Python's own, and methods of its classes."""
    names = sorted({name for each in nested(code) for name in _global_names(each)})
    own = [name for name in names if name not in scope]
    methods = [
        f"{name} = {words_for(scope[name])}"
        for name in names
        if isinstance(scope.get(name), types.MethodDescriptorType)
    ]
    return ", ".join([*own, *methods])


@functools.cache
def _global_names(code: types.CodeType) -> frozenset[str]:
    return frozenset(
        each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"
    )


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or kind.__module__


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (
        "torch",
        "builtins",
        "abc",
        "typing",
        "collections",
    )
