"""Registers a backend with torch, so that `torch.compile(backend="name")` finds it.

torch's registry writes attributes on the functions that it is given and compares them by identity
on every compiled call. It therefore gets a plain function of torchloom's own: one per name, made
once, whatever the backend itself is (a bound method, a builtin, an object with slots).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torchloom._torch.registry import forget_backend, register_backend, registered_backends
from torchloom.backends.discovery import discover
from torchloom.backends.records import CompilerFn
from torchloom.errors import BackendError


def make_published(name: str, fn: CompilerFn) -> CompilerFn:
    """Return the plain function through which torch calls `fn`.

    Raises:
        BackendError: when the returned function is called: with options that `fn` does not take, or where
            `fn` returns nothing that can be called.
    """
    takes_options = _takes_options(fn)

    def published(gm: Any, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph with the backend.

        Raises:
            BackendError: the backend takes no options, or returns nothing that can be called.
        """
        if options and not takes_options:
            raise BackendError(
                f"backend {name!r} takes no options, but torch.compile was given "
                f"{', '.join(sorted(options))}: leave mode= and options= out, or let the backend "
                "accept **options"
            )
        compiled = fn(gm, example_inputs, **options)
        if not callable(compiled):
            raise BackendError(
                f"backend {name!r} returned a {type(compiled).__name__}: a backend returns a "
                "function that computes the graph, e.g. gm.forward"
            )
        return compiled

    published.__name__ = published.__qualname__ = name
    extra: Any = published
    extra.compiler_name = name
    # torch.compile asks backends for these by name.
    for attr in ("reset", "get_compiler_config"):
        if hasattr(fn, attr):
            setattr(extra, attr, getattr(fn, attr))
    return published


def add_to_torch(name: str, published: CompilerFn, tags: Sequence[str]) -> None:
    """Add a published function to torch's registry.

    Args:
        name: must be free there.
        published: from `make_published`.
        tags: as for `register_backend`.
    """
    register_backend(published, name=name, tags=tuple(tags))


def remove_from_torch(name: str, published: CompilerFn) -> None:
    """Remove a published function from torch's registry, unless the name belongs to another one by now."""
    if registered_backends().get(name) is published:
        points = discover().get(name)
        forget_backend(name, points[0] if points else None)


def _takes_options(fn: CompilerFn) -> bool:
    """Return whether `fn` accepts keywords besides its two arguments; True if that is not known."""
    try:
        params = inspect.signature(fn).parameters.values()
    except ValueError:  # of builtins
        return True
    if any(param.kind is param.VAR_KEYWORD for param in params):
        return True
    named = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    num_positional_only = sum(p.kind is p.POSITIONAL_ONLY for p in params)
    return len(named) + num_positional_only > 2
