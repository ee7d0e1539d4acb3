"""Whether torch.compile works here, and keeping functions out of it."""

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
    """Return what keeps torch.compile from working here, or None."""
    return why_no_dynamo()


def check_supported() -> None:
    """Raise unless torch.compile works here.

    Raises:
        CompileError: with what keeps it from working.
    """
    reason = why_unsupported()
    if reason is not None:
        raise CompileError(f"torch.compile does not work here: {reason}")


def is_compiling() -> bool:
    """Say whether torch.compile is tracing this very call."""
    return torch.compiler.is_compiling()


def disable(fn: F) -> F:
    """Keep a function, and all that it calls, out of compiled graphs.

    Where torch.compile does not work the function is returned as it is.

    Example:
        >>> @disable
        ... def log_line(text):
        ...     print(text)
    """
    if not is_compile_supported():
        return fn
    return torch.compiler.disable(fn)
