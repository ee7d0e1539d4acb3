"""The code that a trace went through, found again where it is reached now.

Dynamo keeps the objects themselves: a function that is replaced is another object. Here code objects are compared
by what they do, not by their text: names of files and numbers of lines do not count, and neither do files that
were edited after they were imported. Each code is looked for

    in the classes of what the trace read     `type(self.act).forward`, in each class that it inherits from
    in the functions that it read             globals, attributes, arguments, cells, what a decorator wraps
    under its name in its module              the rest

and a program with code that is in none of these is not stored. What torch itself defines is told by its version.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchloom.pieces.places import Place
from torchloom.qualnames import qualname_of
from torchloom.serve.attributes import own_class
from torchloom.serve.bytecode import digest_of, nested
from torchloom.serve.words import NotExactError, exact, name_of, words_for

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
        kind = own_class(kind)
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
        found = {label: f"{digest_of(code)} {_defaults(function)}"}
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


@dataclass(frozen=True)
class Codes:
    """The code that a program was traced from."""

    names: tuple[str, ...]
    reached: tuple[Mapping[str, Any], ...]
    """Each: places where the same code is reached, "files" by label and "was", digests by label."""

    def changed(self, look_up: Any) -> list[str]:
        """Say what differs now, one line each.

        Args:
            look_up: returns the value at a place.
        """
        reader, lines = Reader(frozenset(self.names)), list[str]()
        for each in self.reached:
            was = each["was"]
            for place in each["places"]:
                try:
                    now = reader.read(look_up(place))
                except Exception as error:  # noqa: BLE001 - attributes may raise anything
                    lines.append(
                        f"source of {next(iter(was), place)}: gone ({type(error).__name__})"
                    )
                    break
                if now == was:
                    continue
                labels = [label for label in {**was, **now} if was.get(label) != now.get(label)]
                lines += [
                    f"source changed: {Path(each['files'].get(label) or reader.files.get(label, '?')).name}, {label}"
                    for label in labels
                ]
                break
        return list(dict.fromkeys(lines))

    def to_json(self) -> dict[str, Any]:
        """Return it as texts."""
        return {"names": list(self.names), "reached": [dict(each) for each in self.reached]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Codes:
        """Return what `to_json` wrote."""
        return cls(tuple(stored["names"]), tuple(stored["reached"]))


def codes_of(
    traced: Iterable[types.CodeType],
    values: Sequence[tuple[Place, Any]],
    modules: Mapping[str, Any],
) -> tuple[Codes, list[str]]:
    """Return the code of a trace with the places where it is reached, and what is in none.

    Args:
        traced: code objects.
        values: what the trace read, with its place.
        modules: where to look for the rest, `sys.modules`.
    """
    own = {code: None for code in traced if not has_version(code)}
    every = dict.fromkeys(traced)
    names = {code.co_name for code in every}
    names |= set(_aliases(every, [value for _, value in values]))
    reader = Reader(frozenset(names))
    grouped: dict[int, dict[str, Any]] = {}
    for place, value in values:
        was = reader.read(value)
        if not was:
            continue
        # What brings the same code is kept once, with all places where it has to be found.
        kind = (
            value
            if isinstance(value, (type, types.FunctionType, types.MethodType))
            else type(value)
        )
        key = id(kind) if not list(functions_in(value)) else id(value)
        found = grouped.setdefault(key, {"places": [], "was": was, "files": {}})
        if found["was"] != was:
            found = grouped.setdefault(-len(grouped) - 1, {"places": [], "was": was, "files": {}})
        found["places"].append(place)
    unreached = [
        f"what {name_of(function)} returned, which it is told to assume to be constant"
        for _, value in values
        for function in functions_in(value)
        if "_dynamo_marked_constant" in vars(function)
    ]
    for code in own:
        if code in reader.seen:
            continue
        place = _by_name(code, modules)
        if place is None:
            unreached.append(f"the code of {code.co_name} ({Path(code.co_filename).name})")
            continue
        was = reader.read(_at(place, modules))
        grouped[id(code)] = {"places": [place], "was": was, "files": {}}
    for each in grouped.values():
        each["files"] = {
            label: Path(reader.files[label]).name for label in each["was"] if label in reader.files
        }
    return Codes(tuple(sorted(names)), tuple(grouped.values())), unreached


def scopes_of(values: Iterable[tuple[Place, Any]]) -> dict[int, Place]:
    """Return places of the globals of functions that belong to no module, by their `id`.

    Args:
        values: what a trace read, with its place.
    """
    found: dict[int, Place] = {}
    for place, value in values:
        if isinstance(value, types.FunctionType):
            _put_globals(found, value, place)
            continue
        kind, steps = (
            (value, ()) if isinstance(value, type) else (type(value), (["applied", "type"],))
        )
        for name, each in list(vars(kind).items()):
            if isinstance(each, (types.FunctionType, staticmethod)):
                for function in functions_in(each):
                    _put_globals(found, function, [*place, *steps, ["attribute", name]])
    return found


def _put_globals(found: dict[int, Place], function: types.FunctionType, place: Place) -> None:
    scope = function.__globals__
    if vars(sys.modules.get(scope.get("__name__", ""), types)) is not scope:
        found.setdefault(id(scope), [*place, ["attribute", "__globals__"]])


def _aliases(traced: Mapping[types.CodeType, None], values: Iterable[Any]) -> Iterator[str]:
    """Yield names under which classes hold traced functions that have another name of their own."""
    kinds = {value if isinstance(value, type) else type(value) for value in values}
    for each in {base for kind in kinds for base in kind.__mro__}:
        for name, value in list(vars(each).items()):
            if any(function.__code__ in traced for function in functions_in(value)):
                yield name


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


_STANDARD = (torch.__path__[0], sysconfig.get_path("stdlib"))
_ADDED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def has_version(code: types.CodeType) -> bool:
    """Return whether the version of torch or Python, which are part of a key, stands for code."""
    path = code.co_filename
    if path.startswith((_STANDARD[0], "<frozen ")):
        return True
    return path.startswith(_STANDARD[1]) and not path.startswith(_ADDED)


def _by_name(code: types.CodeType, modules: Mapping[str, Any]) -> list[list[Any]] | None:
    """Return the place of a function by module and name, None where something else is there."""
    qualname = qualname_of(code)
    for name, module in list(modules.items()):
        if getattr(module, "__file__", None) != code.co_filename and name != "__main__":
            continue
        place = [["module", name], *(["attribute", part] for part in qualname.split("."))]
        try:
            found = _at(place, modules)
        except (AttributeError, KeyError):
            continue
        if any(function.__code__ is code for function in functions_in(found)):
            return place
    return None


def _at(place: list[list[Any]], modules: Mapping[str, Any]) -> Any:
    (_, name), *steps = place
    value = modules[name]
    for _, attribute in steps:
        value = getattr(value, attribute)
    return value
