"""Shard and compile the models of a framework's run, as one configuration asks.

    read        the configuration, with "auto" filled in by the framework
    shard       a model, before or after its optimizer was built
    compile     it, once it is known which optimizer steps it
    follow      an optimizer, so that the files of its states are whole

Frameworks call the model and the optimizer themselves, so this is the API for loops of one's own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import torchloom
from torchloom import envs
from torchloom.config import Config, load_config
from torchloom.errors import ConfigError, ShardError
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession
from torchloom.shard import is_sharded, layout_of, whole_states

logger = get_logger(__name__)

ConfigSource = Config | Mapping[str, Any] | str | Path
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 3}}
"""What a run asks for that brings no configuration."""


class Preparation:
    """Shards and compiles the models of one run.

    Args:
        source: a DeepSpeed-shaped configuration: a dict, a path, or what `load_config` returned; None: stage 3.
        auto: values that the framework gives to keys written as "auto", by dotted path.
        caller: the class that the user named, for messages.

    Raises:
        ConfigError: the configuration is wrong, or asks for what a framework's loop cannot do.
    """

    def __init__(
        self, source: ConfigSource | None, *, auto: Mapping[str, object], caller: str
    ) -> None:
        self.caller = caller
        self.config = _read(DEFAULT if source is None else source, auto)
        self._refuse(self.config)
        self.compiles = _compiles(self.config)
        self._sessions: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def shard(
        self,
        model: nn.Module,
        *,
        init: Callable[[nn.Module], object] | None = None,
        device: torch.device | None = None,
    ) -> nn.Module:
        """Shard a model in place, unless that was done before. All ranks must call.

        Args:
            model: whole, on meta, or sharded.
            init: fills one module's own parameters, for models on meta.
            device: where its parameters go first; None: they stay.

        Raises:
            ShardError: the model cannot be sharded.
        """
        if is_sharded(model):
            layout_of(model)  # a part of it alone is refused
            return model
        if device is not None and not any(tensor.is_meta for tensor in model.parameters()):
            model.to(device)
        return torchloom.shard_model(model, config=self.config, init=init)

    def compile(self, model: nn.Module, optimizer: Optimizer | None) -> CompileSession | None:
        """Compile a sharded model in place, once; return its session, None where the config compiles nothing.

        Args:
            model: sharded.
            optimizer: steps it; None: not known, which a memory budget refuses.
        """
        if self.compiles and self._sessions.get(model) is None:
            self._sessions[model] = torchloom.compile(
                model, config=self.config, optimizer=optimizer
            )
        return self._sessions.get(model)

    def waits_for_optimizer(self) -> bool:
        """Say whether a model can only be compiled once its optimizer is known."""
        options = self.config.compile
        return options.memory_budget is not None or options.plan is not None

    def follow(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        """Let an optimizer write and read whole states.

        Args:
            optimizer: over parameters of sharded models.
            model: which it should step.

        Raises:
            ShardError: it steps parameters on meta, which sharding has replaced.
        """
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        if any(param.is_meta for param in stepped):
            raise ShardError(
                f"this {type(optimizer).__name__} was built over parameters on the meta device, which "
                f"sharding replaces: let {self.caller} prepare the model first, then build the optimizer "
                "from model.parameters()"
            )
        whole_states(optimizer)

    def session_of(self, model: nn.Module) -> CompileSession | None:
        """Return the session that compiled a model, None if none has."""
        return self._sessions.get(model)

    def _refuse(self, config: Config) -> None:
        if config.precision.dtype == "fp16" or (
            config.precision.autocast is not None and config.precision.autocast.dtype == "fp16"
        ):
            raise ConfigError(
                f"fp16 with {self.caller} is not supported, as its loss scaler looks at one rank's shards: "
                "train in bf16, or with torchloom.initialize, which scales the loss over all ranks"
            )
        if config.offload.opt_states:
            raise ConfigError(
                f"zero_optimization.offload_optimizer with {self.caller} is not supported, as the framework "
                'steps the optimizer itself: set "device": "none", give compile.memory_budget, or train with '
                "torchloom.initialize"
            )


def owner_of(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module | None:
    """Return the first of some models whose parameters an optimizer steps, None if it steps none."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return next((m for m in models if any(id(p) in stepped for p in m.parameters())), None)


def run_eagerly(model: nn.Module, method: str, **overrides: Any) -> None:
    """Let a method of a compiled model run without the compiler, with some arguments set.

    Generation calls a model with lengths that grow by one: each would be a recompile, and the entries that it
    uses up are missing in training. torch's `register_fsdp_forward_method` replaces methods of an object likewise.

    Args:
        model: whose method it is; one without it is left alone.
        method: its name, such as "generate".
        overrides: keyword arguments that take the place of the caller's.
    """
    bound = getattr(model, method, None)
    if not isinstance(bound, types.MethodType) or hasattr(bound, "_torchloom_eager"):
        return
    original = bound.__func__

    @functools.wraps(original)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return original(self, *args, **{**kwargs, **overrides})

    run._torchloom_eager = True  # type: ignore[attr-defined]
    # Bound, so that a copy of the model has a method of its own.
    setattr(model, method, types.MethodType(run, model))


def world_size() -> int:
    """Return the number of ranks, as the process group or else the launcher says."""
    return dist.get_world_size() if dist.is_initialized() else envs.launch().world_size


def _read(source: ConfigSource, auto: Mapping[str, object]) -> Config:
    if isinstance(source, Config):
        return source
    return load_config(
        source, world_size=world_size(), auto=auto, replaced=("optimizer", "scheduler")
    )


def _compiles(config: Config) -> bool:
    """Say whether models are compiled: unless the configuration says that they are not."""
    written = config.source.get("compile")
    return not (isinstance(written, Mapping) and written.get("enabled") is False)
