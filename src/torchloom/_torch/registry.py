"""torch's registry of backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any


def registered_backends() -> Mapping[str, Callable[..., Any]]:
    """Return the loaded backends of torch's registry, built-ins included, by name.

    The first call runs torch's lazy import of its backends.
    """
    from torch._dynamo.backends import registry

    registry._lazy_import()
    return registry._COMPILER_FNS


def register_backend(fn: Callable[..., Any], *, name: str, tags: tuple[str, ...]) -> None:
    """Add a plain function to torch's registry.

    Args:
        fn: the backend.
        name: under which torch.compile finds it.
        tags: by which `torch._dynamo.list_backends` leaves it out.
    """
    from torch._dynamo.backends import registry

    # Up to torch 2.13 it asks `fn not in _BACKENDS`, a dict of names.
    registry._COMPILER_FNS.pop(name, None)
    registry.register_backend(fn, name=name, tags=tags)  # type: ignore[arg-type]


def forget_backend(name: str, entry_point: EntryPoint | None) -> None:
    """Take a name out of torch's registry, or give it back to an entry point."""
    from torch._dynamo.backends import registry

    registry._COMPILER_FNS.pop(name, None)
    registry._BACKENDS.pop(name, None)
    tags: dict[str, Any] = getattr(registry, "_BACKEND_TAGS", {})
    tags.pop(name, None)
    if entry_point is not None:
        registry._BACKENDS[name] = entry_point


def backend_tags(name: str) -> tuple[str, ...] | None:
    """Return the tags of a loaded backend of torch's registry, None if there is none."""
    from torch._dynamo.backends import registry

    found = registered_backends().get(name)
    if found is None:
        return None
    if keeps_tags_by_name():
        by_name: dict[str, tuple[str, ...]] = getattr(registry, "_BACKEND_TAGS", {})
        return tuple(by_name.get(name, ()))
    return tuple(getattr(found, "_tags", ()))


def keeps_tags_by_name() -> bool:
    """Return whether torch keeps tags of backends by name, and not as an attribute of the function."""
    from torch._dynamo.backends import registry

    return hasattr(registry, "_BACKEND_TAGS")


@functools.cache
def unknown_backend_error(base: type[Exception]) -> type[Exception]:
    """Return a class that is torch's `InvalidBackend` as well as `base`."""
    from torch._dynamo.exc import InvalidBackend

    def init(self: Exception, message: str) -> None:  # torch's own takes a name
        Exception.__init__(self, message)

    body = {"__init__": init, "__module__": base.__module__, "__doc__": "No such backend."}
    return type("UnknownBackendError", (base, InvalidBackend), body)
