"""The words that a record may show: those that stand in the source of the traced code."""

from __future__ import annotations

import ast
import builtins
import collections
import enum
import functools
import linecache
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch


class Words:
    """The words of the code that was traced, of torch and of Python's builtins.

    Args:
        codes: the functions that were traced, inlined ones as well.
    """

    def __init__(self, codes: Iterable[CodeType] = ()) -> None:
        self._codes = {id(code): code for code in codes}
        self._words = set(_given_words())
        for code in list(self._codes.values()):
            self._words.update(_words_of(code))
        self._files: list[str] | None = None

    def knows(self, word: str) -> bool:
        """Return whether a word occurs in the source; words of one character always count as known."""
        if len(word) <= 1 or word in self._words or re.fullmatch(r"__\w+__|_dynamo_\w+", word):
            return True
        if self._files is None:  # names of the files, only when they are asked for
            self._files = list(dict.fromkeys(code.co_filename for code in self._codes.values()))
        while self._files:
            self._words.update(_names_in(self._files.pop(0)))
            if word in self._words:
                return True
        return False


def _words_of(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    yield code.co_name
    yield from _words_in(code.co_consts)


def _words_in(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        # By exact type: Dynamo puts objects of the program among constants.
        if type(each) is str:
            yield each
        elif type(each) is bytes:
            yield each.decode("latin-1")
        elif type(each) is CodeType:
            yield from _words_of(each)
        elif type(each) in (tuple, frozenset):
            yield from _words_in(each)


@functools.cache
def _given_words() -> frozenset[str]:
    """Return the names of Python's builtins and of torch, which Dynamo reads by itself."""
    owners = (
        *(builtins, object, type, dict, list, tuple, set, str, int, float, complex, range, slice),
        *(FunctionType, MethodType, ModuleType, CodeType, property, enum.Enum),
        *(collections.defaultdict, collections.OrderedDict, collections.deque),
        *(functools.partial, torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module),
    )
    module_code = [
        each.__code__ for each in vars(torch.nn.Module).values() if isinstance(each, FunctionType)
    ]
    return frozenset(
        {
            *(name for owner in owners for name in dir(owner)),
            *vars(torch.nn.Module()),
            "cell_contents",
            *(word for code in module_code for word in _words_of(code)),
        }
    )


@functools.lru_cache(maxsize=256)
def _names_in(file: str) -> frozenset[str]:
    """Return the names in the source of a file, without its strings, which may be secrets."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(_names_of(tree))


def _names_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name
