"""Private names of torch in source files, by their syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_INTERNAL = (
    "torch.fx.experimental.",
    "torch.distributed.distributed_c10d.",
    "torch.distributed.checkpoint.metadata.",
)
"""Modules that are private without an underscore."""
_ACCESS = ("getattr", "hasattr", "setattr", "delattr")
_STANDARD = {"_getframe", "_name", "_fields"}
"""Private names of Python's own library."""


def is_private(path: str) -> bool:
    return path.startswith(_INTERNAL) or re.search(r"\._(?!_)", path) is not None


def paths_in(tree: ast.AST) -> set[str]:
    """Return the dotted paths below torch that code imports, reads, or spells in a text of its own."""
    aliases = dict(_aliases(tree))
    found = {path for path in aliases.values() if path != "torch"}
    found |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("torch.")
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                found.add(_dotted(node, aliases) or "")
            case ast.Call():
                found.add(_asked(node, aliases) or "")
            case ast.Constant(str(text)) if re.fullmatch(r"torch(\.\w+)+", text):
                found.add(text)
    return {re.sub(r"\.__.*", "", path) for path in found if path}


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def _asked(node: ast.Call, aliases: dict[str, str]) -> str | None:
    match node:
        case ast.Call(ast.Name(name), [owner, ast.Constant(str(asked)), *_]) if name in _ACCESS:
            path = _dotted(owner, aliases)
            return None if path is None else f"{path}.{asked}"
    return None


def private_attributes(trees: list[ast.AST]) -> set[str]:
    """Return private attributes that code reads of objects of others."""
    own: set[str] = set(_STANDARD)
    read: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name):
                own.add(name)
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                own.add(name)
            case ast.AnnAssign(ast.Attribute(ast.Name("self"), name)):
                own.add(name)
            case ast.Attribute(ast.Name(owner), name) if owner != "self":
                read.add(name)
            case ast.Attribute(_, name) if not isinstance(node.value, ast.Name):
                read.add(name)
            case ast.Call(ast.Name(asks), [_, ast.Constant(str(name)), *_]) if asks in _ACCESS:
                read.add(name)
    return {name for name in read - own if re.match(r"_(?!_)", name)}


def words_in(tree: ast.AST) -> set[str]:
    """Return the identifiers of code, and the words of its texts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
            case ast.Constant(str(text)):
                found |= set(re.findall(r"\w+", text))
            case ast.keyword(arg=str(name)):
                found.add(name)
    return found


def trees_of(folder: Path) -> list[ast.AST]:
    return [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]
