"""Where Inductor looks for shared objects while it builds, and while a stored artifact is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Load = Callable[[], Any]
"""Builds or finds a shared object, and loads it."""

_LOCK = threading.RLock()
"""Held while torch's way to find libraries is another one: builds and loads take turns."""


@contextmanager
def watched_libraries(loaded: Callable[[str, str, str | None, str, Path], None]) -> Iterator[None]:
    """Tell of each shared object that Inductor loads meanwhile.

    Args:
        loaded: told the kind of library, its two sources, the device, and the shared object.
    """

    def wrap(original: Any, cls: Any, main: str, device: str, *rest: Any, **more: Any) -> Load:
        load = original(cls, main, device, *rest, **more)

        def told() -> Any:
            library = load()
            path = Path(getattr(library, "__file__", None) or library._name)
            loaded(cls.__name__, main, more.get("optimized_code"), device, path)
            return library

        return told

    with _loading(wrap):
        yield


@contextmanager
def given_libraries(
    find: Callable[[str, str, str | None, str], tuple[str, Callable[[], Any]]],
) -> Iterator[None]:
    """Let Inductor find shared objects that are built already, and build none.

    Args:
        find: given the kind of library, its two sources and the device, returns a name that is this
            library's alone and a function that makes a context of the path to load it by.
    """

    def wrap(_original: Any, cls: Any, main: str, device: str, *_rest: Any, **more: Any) -> Load:
        key, opened = find(cls.__name__, main, more.get("optimized_code"), device)

        def load() -> Any:
            with opened() as path:
                return cls._load_library(path, key)

        return load

    with _loading(wrap):
        yield


@contextmanager
def _loading(wrap: Callable[..., Load]) -> Iterator[None]:
    """Have `wrap` asked for each library that Inductor wants."""
    from torch._inductor.codecache import CppCodeCache

    with _LOCK:
        method = CppCodeCache.__dict__["load_async"]
        original = method.__func__

        def load_async(
            cls: type, main_code: str, device_type: str = "cpu", *rest: Any, **more: Any
        ) -> Load:
            return wrap(original, cls, main_code, device_type, *rest, **more)

        CppCodeCache.load_async = classmethod(load_async)
        try:
            yield
        finally:
            CppCodeCache.load_async = method


@contextmanager
def before_codegen(look: Callable[[], None]) -> Iterator[None]:
    """Call a function between AOTAutograd and Inductor; a torch without the place between calls it never."""
    from torch._inductor import compile_fx

    original = getattr(compile_fx, "_recursive_joint_graph_passes", None)
    if original is None:
        yield
        return

    def passes(*args: Any, **kwargs: Any) -> Any:
        look()
        return original(*args, **kwargs)

    with _LOCK, mock.patch.object(compile_fx, "_recursive_joint_graph_passes", passes):
        yield
