"""The registry of compiler backends: one list that includes torch's own.

A backend is a callable `(gm, example_inputs, **options) -> callable`. What is registered here works
in `torch.compile(backend="name")`, and what torch, other libraries or their entry points registered
is found here. Combinators build new backends from others.

Example:
    >>> @register_backend
    ... def my_backend(gm, example_inputs):
    ...     return gm.forward
    >>> torch.compile(fn, backend="my_backend")  # doctest: +SKIP
"""

from __future__ import annotations

from torchloom.backends.check import check_against_eager
from torchloom.backends.claims import BackendInfo, CompiledFn, CompilerFn, describe_backends
from torchloom.backends.combinators import by_device, fallback, tee
from torchloom.backends.registry import (
    list_backends,
    lookup_backend,
    register_backend,
    register_debug_backend,
    register_experimental_backend,
    temporary_backend,
    unregister_backend,
)

__all__ = [
    "BackendInfo",
    "CompiledFn",
    "CompilerFn",
    "by_device",
    "check_against_eager",
    "describe_backends",
    "fallback",
    "list_backends",
    "lookup_backend",
    "register_backend",
    "register_debug_backend",
    "register_experimental_backend",
    "tee",
    "temporary_backend",
    "unregister_backend",
]
