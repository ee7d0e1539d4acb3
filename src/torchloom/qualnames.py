"""Qualified names of code objects, which Python 3.10 does not keep: there they are looked up in the source."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Mapping
from types import CodeType

_Defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def qualname_of(code: CodeType) -> str:
    """Return the qualified name of a code object, its plain one where neither Python nor its source tells more.

    Example:
        >>> qualname_of(ast.NodeVisitor.visit.__code__)
        'NodeVisitor.visit'
    """
    known = getattr(code, "co_qualname", None)
    if known is not None:
        return known
    return _names_in(code.co_filename).get((code.co_firstlineno, code.co_name), code.co_name)


@functools.lru_cache(maxsize=256)
def _names_in(file: str) -> Mapping[tuple[int, str], str]:
    """Return the qualified names of the functions of a file, by first line and name."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[tuple[int, str], str] = {}
    for place, name in _functions_in(tree, ""):
        if found.setdefault(place, name) != name:  # two lambdas of one line
            found[place] = place[1]
    return found


def _functions_in(tree: ast.AST, prefix: str) -> Iterator[tuple[tuple[int, str], str]]:
    for node in ast.iter_child_nodes(tree):
        yield from _functions_at(node, prefix)


def _functions_at(node: ast.AST, prefix: str) -> Iterator[tuple[tuple[int, str], str]]:
    name, inside = prefix, list[ast.AST]()
    if isinstance(node, ast.Lambda):
        name, inside = f"{prefix}<lambda>", [node.body]
        yield (node.lineno, "<lambda>"), name
    elif isinstance(node, _Defines):
        name, inside = f"{prefix}{node.name}", list(node.body)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        yield (first, node.name), name
    start = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
    for child in ast.iter_child_nodes(node):  # defaults and decorators belong to what is around
        yield from _functions_at(child, start if child in inside else prefix)
