"""Evaluates the expressions by which a trace names what it relied on, in this process and in those that load a program.

Dynamo names a value by Python over `L`, the arguments, and `G`, the globals: `L['self']._modules['norm'].eps`. `portable`
rewrites what the process that traced alone understands. A store keeps the text, signed as all that it holds, and `evaluate`
gives it no names but those below: text that needs another one leads nowhere.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import operator
import os
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from torchloom._torch.modes import default_device
from torchloom.envs import environment


class Words(str):
    """A value that answers a question in these words."""

    __slots__ = ()


def _module(name: str) -> types.ModuleType:
    return sys.modules.get(name) or import_module(name)


def _setting(name: str) -> Words:
    """Return what a variable of the environment is set to, in words that do not give it away."""
    value = environment().get(name)
    if value is None:
        return Words("not set")
    digest = hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return Words(f"set ({digest})")


def _keys(value: dict[Any, Any]) -> Any:
    """Return the keys in the order that iterating over the dict has: the one that a trace went by."""
    return OrderedDict.keys(value) if isinstance(value, OrderedDict) else dict.keys(value)


_BUILTINS = (dict, getattr, hasattr, int, list, object, slice, type)
NAMES: Mapping[str, Any] = {
    "__builtins__": {},
    **{each.__name__: each for each in _BUILTINS},
    "torch": torch,
    "default_device": default_device,
    "module": _module,
    "setting": _setting,
    "keys": _keys,
    "len": operator.length_hint,  # also of what a tuple's iterator has still to give
    "___odict_getitem": OrderedDict.__getitem__,
    "___tuple_iterator_getitem": lambda iterator, place: [*copy.copy(iterator)][place],
    "___namedtuple_fields": lambda value: value._fields,
    "___dataclass_fields": dataclasses.fields,
}
"""What expressions may name besides `L` and `G`: Dynamo's names, and those of `portable` and of questions."""
_ROOTS = frozenset({"L", "G", "torch", "module", "default_device"})
_NOWHERE = re.compile(
    r"___get_current_stream\(|___get_torch_function_mode_stack_at\(|.*___unnamed_scope_"
)
"""Expressions for what belongs to whoever calls, and for globals of functions that were made by `exec`, such as those of
named tuples: the class that they belong to has an expression of its own."""
_ROOT = re.compile(r"\bG\['(\w+)'\]|^(torch)(?=\.)|__import__\('(\w+)[\w.]*'\)")
_VARIABLE = re.compile(r".+environ\._data\[(b'[^']*')\]")


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """Return what an expression stands for; parts of packages that are not imported yet are.

    Args:
        expression: of a trace of this process, or of an entry whose signature holds.
        names: `NAMES`, `L`, `G`, and what else there is.

    Raises:
        Exception: there is nothing (any more).
    """
    try:
        return eval(expression, names)
    except AttributeError as error:
        part = f"{getattr(error.obj, '__name__', '')}.{error.name}"
        if not isinstance(error.obj, types.ModuleType) or part in sys.modules:
            raise
        import_module(part)  # as the traced code does when it is called
        return evaluate(expression, names)


def portable(source: str, modules: Mapping[str, str], value_of: Callable[[str], Any]) -> str | None:
    """Return an expression of a trace as one for any process; None if only the trace had what it names.

    Args:
        source: over `L` and `G`.
        modules: names that the trace gave to modules among the globals.
        value_of: evaluates an expression.
    """
    if _NOWHERE.match(source):
        return None
    if variable := _VARIABLE.fullmatch(source):
        return f"setting({os.fsdecode(ast.literal_eval(variable[1]))!r})"

    def spelled(found: re.Match[str]) -> str:
        name, module = found[1], found[2] or found[3]
        if module:
            return f"module({module!r})"
        if name.startswith("__builtins_dict__"):
            return "module('builtins').__dict__"
        return f"module({modules[name]!r})" if name in modules else found[0]

    try:
        tree = ast.parse(_ROOT.sub(spelled, source.replace("dict.keys(", "keys(")), mode="eval")
    except SyntaxError:
        return None
    if _ROOTS.isdisjoint(each.id for each in ast.walk(tree) if isinstance(each, ast.Name)):
        return None
    return ast.unparse(_KeysByName(value_of).visit(tree))


class _KeysByName(ast.NodeTransformer):
    """Writes a key that is a text where its position in a dict stands: `d[list(keys(d))[0]]`.

    Other keys, such as the numbers of hooks, are given out anew by each process.
    """

    def __init__(self, value_of: Callable[[str], Any]) -> None:
        self._value_of = value_of

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        node.slice = self._named(node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args[1:] = map(self._named, node.args[1:])
        return node

    def _named(self, key: ast.expr) -> ast.expr:
        is_found = isinstance(key, (ast.Subscript, ast.Call))
        value = self._value_of(ast.unparse(key)) if is_found else None
        return ast.Constant(value) if type(value) is str else key
