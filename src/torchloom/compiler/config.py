"""The `compile` section of a config as a frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchloom.compiler.support import why_unsupported
from torchloom.config import CompileOptions, load_config
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
