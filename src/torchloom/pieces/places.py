"""Where a value is found that a trace relied on, as data: a root and the steps from it.

Dynamo names such values by expressions, `L['self']._modules['norm'].eps`. They are taken apart once, in the
process that traced; what is stored is a list of steps, of the kinds that are here and no other:

    [["argument", "self"], ["attribute", "_modules"], ["item", "norm"], ["attribute", "eps"]]

Following steps reads arguments, attributes and items. Nothing is evaluated, and nothing is called but the
functions in the tables below.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchloom import envs
from torchloom._torch.modes import default_device

Place = Sequence[Sequence[Any]]


class NoPlaceError(ValueError):
    """An expression is of none of the kinds that can be written down."""


def _iterated(iterator: Any) -> list[Any]:
    """Return what a tuple's iterator has still to give, without taking it."""
    _, (items,), *start = iterator.__reduce__()
    return list(items)[start[0] if start else 0 :]


def _referent(value: Any) -> Any:
    if not isinstance(value, weakref.ref):
        raise TypeError(f"a {type(value).__name__} is no weak reference")
    return value()


def _size(value: Tensor) -> list[int]:
    return list(Tensor.size(value))


def _stride(value: Tensor) -> list[int]:
    return list(Tensor.stride(value))


def _keys(value: dict[Any, Any]) -> Any:
    """Return the keys in the order that iterating over the dict has: the one that a trace went by."""
    return OrderedDict.keys(value) if isinstance(value, OrderedDict) else dict.keys(value)


_APPLIED: Mapping[str, Callable[[Any], Any]] = {
    "type": type,
    "dict": dict,
    "list": list,
    "int": int,
    "dict.keys": _keys,
    "___namedtuple_fields": lambda value: value._fields,
    "___dataclass_fields": dataclasses.fields,
    "size": _size,
    "stride": _stride,
    "storage_offset": Tensor.storage_offset,
    "item": Tensor.item,
    "referent": _referent,
}
"""What may be applied to a value: by the names that Dynamo has for it, and the methods of tensors."""
_METHODS = frozenset({"size", "stride", "storage_offset", "item"})
ENVIRON = "os.environ"
_STATE: Mapping[str, Callable[[], Any]] = {
    ENVIRON: envs.environment,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "utils_device.CURRENT_DEVICE": default_device,
}
"""Settings of torch's own, and of the process, that a trace may rely on."""
_PER_THREAD = ("___get_current_stream(", "___get_torch_function_mode_stack_at(")
"""What belongs to whoever calls, and is no part of the model."""
_MOST_MODULES = 8
"""Steps at the beginning of a place that may lead through packages."""
_UNNAMED = "___unnamed_scope_"
"""How the trace calls globals of functions that were made by `exec`, such as those of named tuples: the class
that they belong to has a place."""
_AT = ("item at", "dict item at")
"""Steps whose key is at a place of its own."""
_CONSTANTS = (str, int, float, bool, type(None))


def place_of(expression: str, modules: Mapping[str, str]) -> list[list[Any]] | None:
    """Return where an expression of `FullGraph.sources` leads, None if that is nowhere but in the trace.

    Args:
        expression: over `L` and `G`.
        modules: names that the trace gave to modules among its globals.

    Raises:
        NoPlaceError: it leads somewhere by a way that cannot be written down.
    """
    if expression in _STATE:
        return [["state", expression]]
    if expression.startswith(_PER_THREAD):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not names & {"L", "G", "torch", "__import__"}:
        return None  # a value that the trace made
    return None if _UNNAMED in expression else _rooted(_steps(tree), modules)


def _rooted(place: list[list[Any]], modules: Mapping[str, str]) -> list[list[Any]]:
    """Return a place with the names that a trace gave to modules replaced by theirs."""
    (kind, name), *steps = place
    steps = [[step[0], _rooted(step[1], modules)] if step[0] in _AT else step for step in steps]
    if kind != "global":
        return [[kind, name], *steps]
    if name in modules:
        return [["module", modules[name]], *steps]
    if name.startswith("__builtins_dict__"):
        return [["module", "builtins"], ["attribute", steps[0][1]], *steps[1:]]
    return [[kind, name], *steps]


def settled(place: Place, scope: Mapping[str, Any]) -> list[list[Any]]:
    """Return a place with names themselves where it says at which position of a dict they are.

    Args:
        place: what `place_of` returned.
        scope: as for `value_at`.
    """
    found: list[list[Any]] = []
    value: Any = None
    for number, step in enumerate(place):
        before, value = value, _at(place[: number + 1], scope) if number < _MOST_MODULES else None
        if step[0] == "attribute" and _is_part(before, step[1], value):
            found.append(["submodule", step[1]])
            continue
        # Names stay, while numbers such as those of hooks are given out anew by each process.
        if step[0] in _AT and type(key := value_at(step[1], scope)) is str:
            found.append([step[0].removesuffix(" at"), key])
        else:
            found.append(list(step))
    return found


def _at(place: Place, scope: Mapping[str, Any]) -> Any:
    """Return the module at a place, None where something else is."""
    if len(place) > 1 and any(step[0] != "attribute" for step in place[1:]):
        return None
    value = value_at(place, scope)
    return value if isinstance(value, types.ModuleType) else None


def _is_part(package: Any, name: str, part: Any) -> bool:
    """Return whether a module is one of a package's, which whoever imports the package alone does not have."""
    if (
        not isinstance(package, types.ModuleType)
        or part is None
        or not hasattr(package, "__path__")
    ):
        return False
    return sys.modules.get(f"{package.__name__}.{name}") is part


def value_at(place: Place, scope: Mapping[str, Any]) -> Any:
    """Return what is at a place.

    Args:
        place: what `place_of` returned.
        scope: `L`, the arguments, `G`, the globals, and `call`, what is served.

    Raises:
        ValueError: a step is of no kind that is known.
        Exception: there is nothing (any more).
    """
    (kind, name), *steps = place
    match kind:
        case "argument":
            value = scope["L"][name]
        case "global":
            value = scope["G"][name]
        case "module":
            value = sys.modules.get(name) or import_module(name)
        case "call":
            value = scope["call"]
        case "state" if name in _STATE:
            value = _STATE[name]()
        case _:
            raise ValueError(f"{kind!r} {name!r} is no root of a place")
    for step in steps:
        value = _taken(value, step, scope)
    return value


def _taken(value: Any, step: Sequence[Any], scope: Mapping[str, Any]) -> Any:  # noqa: PLR0911, C901 - one for each kind
    match step:
        case ["attribute", str(name)]:
            return getattr(value, name)
        case ["submodule", str(name)]:
            return _part(value, name)
        case ["own attribute", str(name)]:
            return object.__getattribute__(value, name)
        case ["item", str() | int() | float() | None as key]:
            return value[key]
        case ["items", [*key]]:
            return value[tuple(key)]
        case ["slice", ends]:
            return value[slice(*ends)]
        case ["item at", place]:
            return value[value_at(place, scope)]
        case ["dict item", str() | int() | float() | None as key]:
            return dict.__getitem__(value, key)
        case ["dict item at", place]:
            return dict.__getitem__(value, value_at(place, scope))
        case ["list item", int(index)]:
            return list.__getitem__(value, index)
        case ["iterated", int(index)]:
            return _iterated(value)[index]
        case ["applied", str(name)] if name in _APPLIED:
            return _APPLIED[name](value)
    raise ValueError(f"{step!r} is no step to a value")


def _part(package: Any, name: str) -> Any:
    """Return a module of a package, imported if it was not yet: the traced code imports it when it is called."""
    if not isinstance(package, types.ModuleType):
        raise TypeError(f"a {type(package).__name__} is no package")
    if not hasattr(package, name) and name.isidentifier() and hasattr(package, "__path__"):
        import_module(f"{package.__name__}.{name}")
    return getattr(package, name)


def _steps(tree: ast.expr) -> list[list[Any]]:  # noqa: PLR0911 - one for each form of expression
    match tree:
        case ast.Subscript(ast.Name("L"), ast.Constant(str(name))):
            return [["argument", name]]
        case ast.Subscript(ast.Name("G"), ast.Constant(str(name))):
            return [["global", name]]
        case ast.Name("torch"):
            return [["module", "torch"]]
        case ast.Call(ast.Name("__import__"), [ast.Constant(str(name))]):
            return [["module", name.partition(".")[0]]]
        case ast.Attribute(base, name):
            return [*_steps(base), ["attribute", name]]
        case ast.Subscript(base, key):
            return [*_steps(base), _item(key)]
        case ast.Call(function, args, []):
            return _call(function, args)
    raise NoPlaceError(ast.unparse(tree))


def _item(key: ast.expr) -> list[Any]:
    match key:
        case ast.Slice(low, high, by):
            return [
                "slice",
                [None if each is None else _constant(each) for each in (low, high, by)],
            ]
        case ast.Call(ast.Name("slice"), ends):
            return ["slice", [_constant(each) for each in ends]]
        case ast.Tuple(parts):
            return ["items", [_constant(each) for each in parts]]
        case ast.Constant() | ast.UnaryOp():
            return ["item", _constant(key)]
    return ["item at", _steps(key)]


def _call(function: ast.expr, args: list[ast.expr]) -> list[list[Any]]:  # noqa: PLR0911 - one for each form
    name = ast.unparse(function)
    match args:
        case [base] if name in _APPLIED and name not in _METHODS:
            return [*_steps(base), ["applied", name]]
        case [base, ast.Constant(str(attribute))] if name == "getattr":
            return [*_steps(base), ["attribute", attribute]]
        case [base, ast.Constant(str(attribute))] if name == "object.__getattribute__":
            return [*_steps(base), ["own attribute", attribute]]
        case [base, key] if name in ("dict.__getitem__", "___odict_getitem"):
            kind, *rest = _item(key)
            if kind in ("item", "item at"):
                return [*_steps(base), [f"dict {kind}", *rest]]
        case [base, key] if name == "list.__getitem__":
            return [*_steps(base), ["list item", _constant(key)]]
        case [base, key] if name == "___tuple_iterator_getitem":
            return [*_steps(base), ["iterated", _constant(key)]]
        case []:
            return _asked(function)
    raise NoPlaceError(f"{name}({', '.join(map(ast.unparse, args))})")


def _asked(function: ast.expr) -> list[list[Any]]:
    """Return the steps of a call without arguments: a tensor's method, or what a reference refers to."""
    match function:
        case ast.Attribute(base, name) if name in _METHODS:
            return [*_steps(base), ["applied", name]]
        case ast.Subscript(ast.Name("G")):
            return [*_steps(function), ["applied", "referent"]]
    raise NoPlaceError(f"{ast.unparse(function)}()")


def _constant(tree: ast.expr) -> Any:
    try:
        value = ast.literal_eval(tree)
    except ValueError:
        raise NoPlaceError(ast.unparse(tree)) from None
    if not isinstance(value, _CONSTANTS):
        raise NoPlaceError(ast.unparse(tree))
    return value
