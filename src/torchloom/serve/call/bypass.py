"""A switch that makes decorated models run uncompiled, while one of them is compared with its program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

IS_BYPASSED: ContextVar[bool] = ContextVar("torchloom_serve_bypassed", default=False)


@contextmanager
def bypassed() -> Iterator[None]:
    """Let all decorated models run as they are, in this context."""
    token = IS_BYPASSED.set(True)
    try:
        yield
    finally:
        IS_BYPASSED.reset(token)
