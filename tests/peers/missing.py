"""What stands for a name of a peer that torchloom has no counterpart of: it can be imported, not used."""

from __future__ import annotations

from typing import Any, NoReturn


class NoCounterpartError(Exception):
    """A test uses a name that the map has nothing for."""


class _Refuses(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoCounterpartError(f"{cls.__qualname__} has no counterpart")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return missing(f"{cls.__qualname__}.{name}")

    def __iter__(cls) -> Any:
        raise NoCounterpartError(f"{cls.__qualname__} has no counterpart")


def missing(name: str) -> type:
    """Return a class that stands for a missing name: of no object, without instances.

    Args:
        name: with its module.
    """
    return _Refuses(name.rpartition(".")[2], (), {"__qualname__": name, "__module__": __name__})
