"""Resolves the backend of a config: a registered name, a path or a callable."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torchloom.backends import list_backends
from torchloom.config.findings import nearest
from torchloom.errors import ConfigError


def get_backend_fn(backend: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return the backend for a name, a path or a callable.

    Args:
        backend: a callable; a registered name; or "package.module.function" (also
            "package.module.Class.method"), which is imported. An import runs that module's code:
            take paths from configs that you trust, as you would a script.

    Returns:
        A callable as it is, a registered name as it is (it is looked up when compiling), or what
        the path names.

    Raises:
        ConfigError: neither a name nor a path that can be imported, or what it names is not
            callable. An error inside a module that is found is raised as it is.

    Example:
        >>> get_backend_fn("inductor")
        'inductor'
    """
    if callable(backend) and not isinstance(backend, str):
        return backend
    if not isinstance(backend, str):
        raise ConfigError(
            f"the backend must be a string or Callable, not {type(backend).__name__}: name a "
            "registered backend, a path 'package.module.function', or pass a function"
        )
    known = list_backends(exclude_tags=())
    if backend in known:
        return str(backend)
    parts = backend.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        close = nearest(backend, known)
        hint = f"did you mean {close!r}?" if close else "write 'package.module.function'"
        raise ConfigError(
            f"The backend {backend!r} is not in the list of available backends and is not a path: "
            f"{hint} `torchloom backends` lists all names"
        )
    found = _import(parts)
    if not callable(found):
        raise ConfigError(
            f"the backend {backend!r} is a {type(found).__name__}, not a function: name a callable "
            "(gm, example_inputs) -> callable"
        )
    return found


def _import(parts: list[str]) -> Any:
    """Import the longest module that a path begins with, and follow the rest as attributes."""
    path = ".".join(parts)
    for num_module_parts in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:num_module_parts])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the absence of this very module; one that it imports itself is its own error.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        for depth, attr in enumerate(parts[num_module_parts:], num_module_parts):
            if not hasattr(found, attr):
                owner = ".".join(parts[:depth])
                close = nearest(attr, dir(found))
                hint = f"did you mean {close!r}?" if close else "check the spelling"
                raise ConfigError(
                    f"The backend {path!r} is not in the list of available backends and could not "
                    f"be imported: {owner!r} has no {attr!r}; {hint}"
                )
            found = getattr(found, attr)
        return found
    raise ConfigError(
        f"The backend {path!r} is not in the list of available backends and could not be imported: "
        f"there is no module {parts[0]!r}; install it, or check the spelling"
    )
