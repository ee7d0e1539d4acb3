"""Reads the `compile` section of a config as a frozen value, and finds its backend: a registered name, a path, a callable."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchloom.backends import list_backends
from torchloom.compiler.support import why_unsupported
from torchloom.config import CompileOptions, load_config
from torchloom.config.findings import nearest
from torchloom.errors import ConfigError

COMPILE_CONFIG = "compile"
"""Key of the section in a config."""

COMPILE_CONFIG_KEY = COMPILE_CONFIG
"""The same as `COMPILE_CONFIG`."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig(CompileOptions):
    """How to compile: the backend, its arguments and the options of `engine.compile()`.

    Raises:
        ConfigError: compiling is asked for where it does not work, or a value cannot be used.

    Example:
        >>> CompileConfig(enabled=True, kwargs={"dynamic": True}).backend
        'inductor'
    """

    backend: str | Callable[..., Any] = "inductor"
    """A registered name, a path "package.module.function", or a callable."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"compile.enabled is {self.enabled!r}: write true or false")
        if not isinstance(self.kwargs, Mapping):
            raise ConfigError(f"compile.kwargs is {self.kwargs!r}: write an object")
        if "backend" in self.kwargs:
            raise ConfigError(
                "compile.kwargs.backend: the backend is given elsewhere; write compile.backend"
            )
        reason = why_unsupported()
        if self.enabled and reason is not None:
            raise ConfigError(f"compile.enabled: torch.compile does not work here: {reason}")


def get_compile_config(param_dict: Mapping[str, Any]) -> CompileConfig:
    """Read the `compile` section of a config dict, which is not changed.

    Args:
        param_dict: a whole config; without the section nothing is compiled.

    Raises:
        ConfigError: the section has errors (the message lists all), or compiling does not work here.

    Example:
        >>> get_compile_config({}).enabled
        False
    """
    section = param_dict.get(COMPILE_CONFIG, {})
    whole: dict[str, object] = {COMPILE_CONFIG: section}
    zero = param_dict.get("zero_optimization")
    if isinstance(zero, Mapping) and "stage" in zero:  # passes are checked against it
        whole["zero_optimization"] = {"stage": zero["stage"]}
    options = load_config(whole, world_size=1).compile
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    return CompileConfig(**given)


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
