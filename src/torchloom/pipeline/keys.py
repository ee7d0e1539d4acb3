"""Texts that identify the passes and the sources which shape woven graphs, for the keys of cached code.

If a pass changes, graphs that its older version made must not come from the cache. The text holds the
pass's source and every plain value in its closure. If the closure holds anything else, such as a list whose
content may change, the text cannot identify the pass, and its graphs are compiled in each run. Such a pass
keeps the text that it had first, so that ranks agree on it although each has recorded different values in
such a list.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import marshal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchloom._torch.inductor import hash_files
from torchloom.deepcompile.forms import adapted_of
from torchloom.graph import GraphPass
from torchloom.passes import PASSES

_FIRST: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()
_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype)


class Identity(NamedTuple):
    """A text that is equal on ranks with the same pass, and whether it identifies the pass completely."""

    text: str
    is_complete: bool


def identity_of(each: GraphPass) -> Identity:
    """Describe a pass; of one that came with torchloom the sources tell the rest."""
    if is_built_in(each):
        return Identity(f"{each.name}/{each.memory_budget_bytes}/{each.options}", True)
    adapted = adapted_of(each)
    body = _function(each.fn if adapted is None else adapted.fn)
    # No key holds what a pass reads of other graphs, the optimizer or the runtime.
    is_complete = body.is_complete and not (adapted and adapted.sees_beyond_its_graph)
    told = body.text
    if not body.is_complete:
        with contextlib.suppress(TypeError):  # no weak references, or no hash
            told = _FIRST.setdefault(each.fn if adapted is None else adapted.fn, told)
    options = _joined([_value(value) for _, value in each.options])
    named = f"{[name for name, _ in each.options]} {options.text}"
    return Identity(
        f"{each.name}/{each.stage}/{each.memory_budget_bytes}/{named}: {told}",
        is_complete and options.is_complete,
    )


def _function(fn: Callable[..., Any]) -> Identity:
    if isinstance(fn, functools.partial):
        parts = [_function(fn.func), *map(_value, fn.args)]
        parts += [_value(item) for pair in sorted(fn.keywords.items()) for item in pair]
        return _joined(parts)
    code = getattr(fn, "__code__", None)
    if code is None:
        return Identity(f"{type(fn).__module__}.{type(fn).__qualname__}", False)
    try:
        source = inspect.getsource(fn)
    except (OSError, TypeError):
        source = hashlib.blake2b(marshal.dumps(code), digest_size=16).hexdigest()
    captured = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    captured += list(getattr(fn, "__defaults__", None) or ())
    captured += list((getattr(fn, "__kwdefaults__", None) or {}).values())
    return _joined([Identity(source, True), *map(_value, captured)])


def _value(value: Any) -> Identity:
    if isinstance(value, _PLAIN):
        return Identity(repr(value), True)
    if isinstance(value, (list, tuple)):
        items = _joined([_value(item) for item in value])
        return items if isinstance(value, tuple) else Identity(items.text, False)
    if callable(value) and hasattr(value, "__code__"):
        return _function(value)
    return Identity(f"{type(value).__module__}.{type(value).__qualname__}", False)


def _joined(parts: list[Identity]) -> Identity:
    return Identity("|".join(p.text for p in parts), all(p.is_complete for p in parts))


def is_built_in(each: GraphPass) -> bool:
    """Say whether a pass is one of torchloom's."""
    known = PASSES.get(each.name)
    return known is not None and known.fn is each.fn


_SHAPING = (
    "_torch",
    "backends",
    "capture",
    "costs",
    "deepcompile",
    "graph",
    "memory",
    "ops",
    "passes",
    "pieces",
    "pipeline",
    "plan",
    "races",
    "regions",
)
"""Rooms whose code shapes woven graphs: they choose what backward computes again, split, rewrite, and plan."""


@functools.cache
def sources_digest() -> str:
    """Return a hash of everything that shapes a woven graph: whole rooms, so that no new file is forgotten.

    It is computed once, because the process runs the source that it imported.
    """
    house = Path(__file__).parents[1]
    paths = (str(path) for room in _SHAPING for path in (house / room).rglob("*.py"))
    return hash_files(tuple(sorted(paths))).hex()
