"""Shard and compile the models of a framework's run, as one configuration asks.

    read        the configuration, with "auto" filled in by the framework
    shard       a model, before or after its optimizer was built
    compile     it, once it is known which optimizer steps it
    follow      an optimizer, so that the files of its states are whole

Frameworks call the model and the optimizer themselves, so this is the API for loops of one's own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

import torchloom
from torchloom.config import Config, load_config
from torchloom.errors import ConfigError, ShardError
from torchloom.integrations.given import (
    DEFAULT,
    Given,
    refuse_contradictions,
    value_at,
    warn_once,
    with_filled,
    without_host_optimizer,
)
from torchloom.launch.groups import world_size_of
from torchloom.log import get_logger
from torchloom.loop.compile import ConfigSource, tree_of
from torchloom.loop.precision import cast_inputs, dtype_of
from torchloom.pipeline import CompileSession
from torchloom.shard import is_sharded, layout_of, whole_states

logger = get_logger(__name__)

HEARD = (
    "collectives",
    "collective_bytes",
    "graphs",
    "recompiles",
    "predicted_peak_bytes",
    "measured_peak_bytes",
)
"""What `torchloom.events.StepEnded` tells of a step that a framework does not know."""


class Preparation:
    """Shards and compiles the models of one run.

    Args:
        source: a DeepSpeed-shaped configuration: a dict, a path, or what `load_config` returned; None: stage 3.
        given: what the framework knows: it is filled in for "auto", and compared with what is written.
        auto: more values for keys written as "auto", by dotted path.
        caller: the class that the user named, for messages.
        unused: keys that count for nothing here, by dotted path, and what the user does instead; a warning
            tells of those that are written.

    Raises:
        ConfigError: the configuration is wrong, contradicts the framework, or asks for what a framework's loop
            cannot do.
    """

    def __init__(
        self,
        source: ConfigSource | None,
        *,
        given: Sequence[Given] = (),
        auto: Mapping[str, object] | None = None,
        caller: str,
        unused: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.caller = caller
        self._auto = {**{each.path: each.value for each in given}, **(auto or {})}
        tree = tree_of(DEFAULT if source is None else source)
        if value_at(tree, "torch_autocast.enabled") is True:  # then it is what casts
            given = [replace(g, value=False) if g.path == "bf16.enabled" else g for g in given]
            self._auto["bf16.enabled"] = False
        for path, instead in unused.items():
            if value_at(tree, path) not in (None, {}):
                warn_once(f"{path} counts for nothing with {caller}: {instead}")
        tree = without_host_optimizer(tree, caller)
        self.written: Mapping[str, Any] = with_filled(tree, given)
        """The configuration as it was written, with what the framework added."""
        refuse_contradictions(
            self.written, [g for g in given if g.path not in (auto or {})], caller
        )
        self.config = self.config_with({}, replaced=("optimizer", "scheduler"))
        self._refuse(self.config)
        section = self.config.source.get("compile")
        self.compiles = not (isinstance(section, Mapping) and section.get("enabled") is False)
        self._sessions: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.broadcasts_buffers = True
        """Whether running statistics are those of rank 0 after each step, as DistributedDataParallel has them."""
        self._hears = False
        self.heard: Mapping[str, float] = {}
        """Numbers of the last step; see `hear`."""

    def config_with(self, auto: Mapping[str, object], *, replaced: Sequence[str] = ()) -> Config:
        """Return the configuration with more values for "auto".

        Args:
            auto: by dotted path.
            replaced: sections that do not count.

        Raises:
            ConfigError: it is wrong, or an "auto" has no value.
        """
        return load_config(
            self.written, world_size=world_size_of(), auto={**self._auto, **auto}, replaced=replaced
        )

    def reads_no_logits(self) -> None:
        """Let logits that a model returns be made when they are read, unless the configuration decides about them."""
        section = self.written.get("compile") or {}
        if section.get("chunk_loss", "auto") == "auto":
            self.written = {**self.written, "compile": {**section, "chunk_loss": "always"}}
            self.config = self.config_with({}, replaced=("optimizer", "scheduler"))

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
            init: fills one module's own parameters, for models on meta; default: as transformers does it for its
                models, `reset_parameters` for others.
            device: where its parameters go first; None: they stay.

        Raises:
            ShardError: the model cannot be sharded.
        """
        if is_sharded(model):
            layout_of(model)  # a part of it alone is refused
            return model
        if device is not None and not any(tensor.is_meta for tensor in model.parameters()):
            model.to(device)
        init = init or initializer_of(model)
        torchloom.shard_model(
            model, config=self.config, init=init, broadcast_buffers=self.broadcasts_buffers
        )
        autocast = self.config.precision.autocast
        if autocast is not None:
            _autocast_forward(model, dtype_of(autocast.dtype))
        return model

    def compile(self, model: nn.Module, optimizer: Optimizer | None) -> CompileSession | None:
        """Compile a sharded model in place, once; return its session, None where the config compiles nothing.

        Args:
            model: sharded.
            optimizer: steps it; None: not known, which a memory budget refuses.
        """
        if self.compiles and self._sessions.get(model) is None:
            self._sessions[model] = torchloom.compile(
                model,
                config=self.config,
                optimizer=optimizer,
                log_to=self._hear if self._hears else None,
            )
            if dist.get_rank() == 0:  # frameworks show nothing before the first step
                self._sessions[model].tell_phases_every_s = 15.0
        return self._sessions.get(model)

    def hear(self) -> None:
        """Let `heard` hold the numbers of the last step of what is compiled from now on; rank 0 alone has them."""
        self._hears = True

    def _hear(self, metrics: Mapping[str, float], step: int) -> None:
        self.heard = {f"torchloom/{name}": metrics[name] for name in HEARD if name in metrics}

    def compile_all(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers keep whole states, and compile the models whose turn it is: a memory budget waits for one.

        Args:
            models: sharded.
            optimizers: the frameworks' wrappers taken off.

        Raises:
            ShardError: an optimizer steps parameters on meta.
        """
        for optimizer in optimizers:
            self.follow(optimizer)
        options = self.config.compile
        waits = options.memory_budget is not None or options.plan is not None
        for model in models:
            own = next((each for each in optimizers if _steps(each, model)), None)
            if own is not None or not waits:
                self.compile(model, own)

    def follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer write and read whole states.

        Args:
            optimizer: over parameters of sharded models.

        Raises:
            ShardError: it steps parameters on meta, which sharding has replaced.
        """
        if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
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
        if config.precision.scales_loss:
            raise ConfigError(
                f"fp16 with {self.caller} is not supported, as its loss scaler looks at one rank's shards: "
                "train in bf16, or with torchloom.initialize, which scales the loss over all ranks"
            )
        if config.offload.opt_states:
            raise ConfigError(
                f"compile.offload_opt_states with {self.caller} is not supported, as the framework steps the "
                "optimizer itself: drop it, give compile.memory_budget, or train with torchloom.initialize"
            )


def _steps(optimizer: Optimizer, model: nn.Module) -> bool:
    """Say whether an optimizer steps parameters of a model."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param) in stepped for param in model.parameters())


def initializer_of(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """Return what fills one module on meta, as transformers initialises it; None for models of others.

    Args:
        model: of transformers, or with adapters of PEFT around one.
    """
    return getattr(_without_adapters(model), "_init_weights", None)


def takes_synced_gpus(model: nn.Module) -> bool:
    """Say whether a model's `generate` is that of transformers, which counts forward passes on all ranks together.

    Args:
        model: of transformers, or with adapters of PEFT around one, or with a `generate` of its own.
    """
    generate = getattr(_without_adapters(model), "generate", None)
    if generate is None:
        return False
    is_of_transformers = str(getattr(generate, "__module__", "")).startswith("transformers.")
    return is_of_transformers or "synced_gpus" in inspect.signature(generate).parameters


def _without_adapters(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


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


def _autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's forward run in autocast and return fp32, as Accelerate's own does for bf16."""
    original = type(model).forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, dtype):
            found = original(self, *args, **kwargs)
        return cast_inputs(found, torch.float32)

    model.__dict__["forward"] = types.MethodType(forward, model)
