"""Tells whether torch.compile works here, and excludes functions from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from torchloom._torch.dynamo import why_no_dynamo
from torchloom.errors import CompileError

F = TypeVar("F", bound=Callable[..., object])


def is_compile_supported() -> bool:
    """Say whether torch.compile works with this Python and this torch.

    Example:
        >>> is_compile_supported()
        True
    """
    return why_unsupported() is None


def why_unsupported() -> str | None:
    """Return why torch.compile does not work here, or None."""
    return why_no_dynamo()


def check_supported() -> None:
    """Raise unless torch.compile works here.

    Raises:
        CompileError: it does not work; the message says why.
    """
    reason = why_unsupported()
    if reason is not None:
        raise CompileError(f"torch.compile does not work here: {reason}")


def is_compiling() -> bool:
    """Say whether torch.compile is tracing this very call."""
    return torch.compiler.is_compiling()


def disable(fn: F) -> F:
    """Exclude a function, and all that it calls, from compiled graphs.

    Returns the function unchanged where torch.compile does not work.

    Example:
        >>> @disable
        ... def log_line(text):
        ...     print(text)
    """
    if not is_compile_supported():
        return fn
    return torch.compiler.disable(fn)
