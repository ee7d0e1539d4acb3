"""Imports that generated wrappers make and do not need.

A wrapper asks `torch._inductor.select_algorithm` for `extern_kernels`, which are plain functions of torch, and
with it for all of Inductor's lowerings: a second and a half. While a stored graph is loaded, such modules are
stand-ins that know the names which are asked for, and import the real module for any other.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from torchloom._torch.generated import (
    DEBUG,
    DECOMPOSITION,
    GRAPH,
    MEMORY_PLANNING,
    SELECT_ALGORITHM,
)

_KERNELS = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm, "baddbmm": torch.baddbmm}
"""What Inductor registers under these names, as it stands in `kernel/mm.py` and `kernel/bmm.py`."""


class _Kernels:
    """Stands for `extern_kernels`; a name that is not known is looked up in the real one, once."""

    def __init__(self) -> None:
        self.__dict__.update(_KERNELS)

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(_real(SELECT_ALGORITHM).extern_kernels, name)
        setattr(self, name, kernel)
        return kernel


def _align(nbytes: Any) -> Any:
    return _real(MEMORY_PLANNING)._align(nbytes)


def _select_decomp_table() -> Any:
    return _real(DECOMPOSITION).select_decomp_table()


class _Lowering:
    """Stands for `GraphLowering`, of which loading calls one method, a hook for logs."""

    @staticmethod
    def save_output_code(code: str) -> None:
        """Hand the code to whoever listens at the real class; nobody can before it is imported."""


class _Stand(types.ModuleType):
    """Stands for a module; a name that it does not know is the real module's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@contextmanager
def light_imports() -> Iterator[None]:
    """Let wrappers that are loaded meanwhile do without Inductor's lowerings."""
    stands = {
        SELECT_ALGORITHM: {"extern_kernels": _Kernels()},
        MEMORY_PLANNING: {"_align": _align},
        GRAPH: {"GraphLowering": _Lowering},
        DECOMPOSITION: {"select_decomp_table": _select_decomp_table},
    }
    put = {}
    for name, content in stands.items():
        if name not in sys.modules:
            put[name] = _Stand(name)
            put[name].__dict__.update(content)
    sys.modules.update(put)
    package, _, name = DEBUG.rpartition(".")
    inductor = import_module(package)
    if not hasattr(inductor, name):
        # Each call reads it. Nothing is recorded before the module itself is imported, which then takes
        # this place.
        stand = _Stand(DEBUG)
        stand.__dict__["RECORD_GRAPH_EXECUTION"] = False
        setattr(inductor, name, stand)
    try:
        yield
    finally:
        for name, stand in put.items():
            if sys.modules.get(name) is stand:
                del sys.modules[name]


def _real(name: str) -> Any:
    """Return the module itself, also where a stand-in has its place."""
    if isinstance(sys.modules.get(name), _Stand):
        del sys.modules[name]
    return import_module(name)
