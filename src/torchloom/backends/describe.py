"""Lists backends: where each comes from, and whether it would work on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchloom import envs
from torchloom.backends.claims import (
    Origin,
    all_names,
    claims_of,
    discover,
    tags_of,
    why_not_loadable,
)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What is known about one name."""

    name: str
    tags: tuple[str, ...] | None
    """None for an entry point that nobody has loaded: its tags are unknown until then."""
    origin: Origin
    hidden: tuple[Origin, ...]
    """Others that claim the name and lost: see `torchloom.backends.claims` for the rule."""
    why_not: str | None
    """The reason why it would not work here, or None."""

    @property
    def is_available(self) -> bool:
        """Whether no reason is known why it would not work here."""
        return self.why_not is None


def describe_backends() -> list[BackendInfo]:
    """Return one row for each name that `torch.compile(backend=...)` takes, sorted by name.

    Loads and runs nothing: availability is judged by installed modules, devices and tools.

    Example:
        >>> [row.name for row in describe_backends() if not row.is_available]  # doctest: +SKIP
        ['cudagraphs', 'openxla', 'tvm']
    """
    points = discover()
    rows = []
    for name in sorted(all_names()):
        origin, *hidden = claims_of(name)
        why_not = None
        if origin.kind == "entry point":
            why_not = why_not_loadable(points[name][0])
        elif origin.kind == "built-in" and name in _NEEDS:
            why_not = _NEEDS[name]()
        rows.append(BackendInfo(name, tags_of(name), origin, tuple(hidden), why_not))
    return rows


def _module(name: str) -> Callable[[], str | None]:
    def check() -> str | None:
        return None if importlib.util.find_spec(name) else f"module {name!r} is not installed"

    return check


def _cuda() -> str | None:
    return None if torch.cuda.is_available() else "it needs a CUDA device"


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call on CPU, or None."""
    for name in (envs.get_str("CXX", ""), "g++", "clang++", "cl"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def _inductor() -> str | None:
    if torch.cuda.is_available():
        return _module("triton")()
    return None if cpp_compiler() else "no C++ compiler is found: install g++ or set CXX"


_NEEDS: dict[str, Callable[[], str | None]] = {
    "cudagraphs": _cuda,
    "inductor": _inductor,
    "openxla": _module("torch_xla"),
    "openxla_eval": _module("torch_xla"),
    "tvm": _module("tvm"),
}
