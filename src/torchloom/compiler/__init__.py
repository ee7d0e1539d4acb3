"""Configures torch.compile from the `compile` section of a JSON config, and compiles modules in place.

    config = get_compile_config({"compile": {"enabled": True, "backend": "inductor"}})
    model = CompiledModuleWrapper(model, config)     # still isinstance(model, YourModel)
    model(batch)                                     # compiled here, once

The engine uses the same pieces.
"""

from __future__ import annotations

from torchloom.compiler.backend_fn import (
    COMPILE_CONFIG,
    COMPILE_CONFIG_KEY,
    CompileConfig,
    get_backend_fn,
    get_compile_config,
)
from torchloom.compiler.support import disable, is_compile_supported, is_compiling
from torchloom.compiler.wrapper import CompiledModuleWrapper

__all__ = [
    "COMPILE_CONFIG",
    "COMPILE_CONFIG_KEY",
    "CompileConfig",
    "CompiledModuleWrapper",
    "disable",
    "get_backend_fn",
    "get_compile_config",
    "is_compile_supported",
    "is_compiling",
]
