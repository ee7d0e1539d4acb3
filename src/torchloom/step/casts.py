"""Select the parameters that may be cast before they are gathered, by module classes that the config names."""

from __future__ import annotations

import sys

from torch import nn

from torchloom.config import PrecisionConfig
from torchloom.errors import ConfigError
from torchloom.shard import Layout, class_of


def cast_params(
    config: PrecisionConfig, model: nn.Module, layout: Layout
) -> tuple[str, ...] | None:
    """Return the parameters that may be cast before they are gathered; None: all.

    Args:
        config: names classes of modules.
        model: sharded or not.
        layout: of its parameters.

    Raises:
        ConfigError: there is no such class.
    """
    if config.autocast is None or config.autocast.modules is None:
        return None
    classes = {_class_named(name) for name in config.autocast.modules}
    safe = {path for path, module in model.named_modules() if class_of(module) in classes}
    return tuple(spec.name for spec in layout if any(owner.module in safe for owner in spec.owners))


def _class_named(name: str) -> type[nn.Module]:
    """Return a class by name; its file is imported already if the model has a module of it."""
    package, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(package), last, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise ConfigError(
        f"torch_autocast.lower_precision_safe_modules: {name!r} is no class of modules that has been "
        "imported; write package.Class, as in torch.nn.Linear"
    )
