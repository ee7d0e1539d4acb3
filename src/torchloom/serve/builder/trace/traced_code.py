"""The code of a trace, with the places where it is reached; `model.code` compares it later."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchloom._torch.introspect import qualname_of
from torchloom.pieces.places import Place
from torchloom.serve.model.code import Codes
from torchloom.serve.model.code_reader import Reader
from torchloom.serve.model.functions import functions_in, has_version
from torchloom.serve.model.spelling import name_of


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
    grouped = _by_code(values, reader)
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


def _by_code(values: Sequence[tuple[Place, Any]], reader: Reader) -> dict[int, dict[str, Any]]:
    """Return the code that values bring with them, once, with all places where it has to be found."""
    grouped: dict[int, dict[str, Any]] = {}
    for place, value in values:
        was = reader.read(value)
        if not was:
            continue
        is_code = isinstance(value, (type, types.FunctionType, types.MethodType))
        kind = value if is_code else type(value)
        key = id(kind) if not list(functions_in(value)) else id(value)
        found = grouped.setdefault(key, {"places": [], "was": was, "files": {}})
        if found["was"] != was:
            found = grouped.setdefault(-len(grouped) - 1, {"places": [], "was": was, "files": {}})
        found["places"].append(place)
    return grouped


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
