"""The entries of the registry: names, origins, and the rule for names that are claimed twice.

The rule: a registration in this process, then a built-in of torch or torchloom, then an entry
point; of several entry points, the distribution whose name sorts first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

CompilerFn = Callable[..., Any]
"""`(gm, example_inputs, **options) -> callable`: what is registered."""

CompiledFn = Callable[..., tuple[Any, ...]]
"""What a backend returns: a function of the graph's inputs that returns its outputs."""

Kind = Literal["built-in", "this process", "entry point"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend comes from."""

    kind: Kind
    where: str
    """"torch", "torchloom", "FILE:LINE" of the function, or "DISTRIBUTION==VERSION (VALUE)"."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}"


@dataclass(frozen=True, slots=True)
class Registration:
    """One name that was registered through torchloom in this process."""

    name: str
    fn: CompilerFn
    tags: tuple[str, ...]
    origin: Origin
    published: CompilerFn
    """The function in torch's registry under this name; the same object while the registration lasts."""


def origin_of(fn: CompilerFn) -> Origin:
    """Say where a function registered in this process was written."""
    target: Any = getattr(fn, "func", fn)  # functools.partial
    target = getattr(target, "__func__", target)  # bound methods
    if code := getattr(target, "__code__", None):
        return Origin("this process", f"{code.co_filename}:{code.co_firstlineno}")
    if hasattr(target, "__qualname__"):
        return Origin("this process", f"{target.__module__}.{target.__qualname__}")
    kind = type(target)
    where = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
    return Origin("this process", f"a {kind.__qualname__} of {where}")
