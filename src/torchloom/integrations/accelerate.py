"""Accelerate: an Accelerator that shards and compiles the models that it prepares.

    accelerator = TorchloomAccelerator(torchloom="ds_config.json")       was Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Written for accelerate 1.15; it takes what Accelerate does for plain data parallelism (gathers of metrics, trackers,
loaders, checkpoints of files that load without torchloom) and leaves out the wrapper DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from torchloom.errors import ConfigError
from torchloom.integrations.given import Given
from torchloom.integrations.prepare import (
    Preparation,
    run_eagerly,
    takes_synced_gpus,
)
from torchloom.launch.groups import world_size_of
from torchloom.loop.compile import ConfigSource
from torchloom.pipeline import CompileSession
from torchloom.shard import full_state_dict, is_sharded

UNUSED: Mapping[str, str] = {
    "optimizer": "pass the optimizer that you built to prepare()",
    "scheduler": "pass the schedule that you built to prepare()",
    "gradient_clipping": "call accelerator.clip_grad_norm_() in the loop",
}
"""Keys that a loop of Accelerate does not read, and what it does instead."""
PLUGINS: Mapping[str, str] = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "a parallelism_config",
}
"""Arguments of an Accelerator that ask for another system that places weights, and its name."""


class TorchloomAccelerator(Accelerator):
    """An Accelerator whose prepared models are sharded and compiled by torchloom.

    Ranks call `save_state`, `load_state`, `get_state_dict` and `save_model` together, as with FSDP. Their files are
    those of an unsharded model and load on any number of ranks.

    Args:
        args: as for `Accelerator`.
        torchloom: a DeepSpeed-shaped configuration: a dict or the path of a file. "auto" is filled in from
            `mixed_precision` and `gradient_accumulation_steps`; default: stage 3.
        auto: more values for "auto", by dotted path.
        kwargs: as for `Accelerator`; `mixed_precision` may be "no" or "bf16".

    Raises:
        ConfigError: the configuration is wrong, contradicts the other arguments, or asks for fp16.

    Example:
        >>> accelerator = TorchloomAccelerator(torchloom={"zero_optimization": {"stage": 3}})  # doctest: +SKIP
        >>> model, optimizer = accelerator.prepare(model, optimizer)  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        torchloom: ConfigSource | None = None,
        auto: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_plugins(kwargs)
        super().__init__(*args, **kwargs)
        self._take(torchloom, auto or {})

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        torchloom: ConfigSource | None = None,
        given: Sequence[Given] = (),
        caller: str = "",
    ) -> TorchloomAccelerator:
        """Let an Accelerator that was made by others, such as a Trainer, be one of this class.

        Args:
            accelerator: that has prepared nothing yet; it stays the same object.
            torchloom: as for the class.
            given: what those others were given.
            caller: the class that the user named, for messages; default: this one.

        Raises:
            ConfigError: as for the class.
        """
        adopted: Any = accelerator
        adopted.__class__ = cls
        adopted._take(torchloom, {}, given, caller)
        return adopted

    def _take(
        self,
        source: ConfigSource | None,
        auto: Mapping[str, object],
        given: Sequence[Given] = (),
        caller: str = "",
    ) -> None:
        _refuse_others(self)
        known = {each.path for each in given}
        own = [each for each in _given_to(self) if each.path not in known]
        self._preparation = Preparation(
            source,
            given=[*own, *given],
            auto=auto,
            caller=caller or type(self).__name__,
            unused={} if caller else UNUSED,
        )
        if getattr(self, "log_with", None):
            self._preparation.hear()
        handler = getattr(self, "ddp_handler", None)
        self._preparation.broadcasts_buffers = getattr(handler, "broadcast_buffers", True)
        # The weights that forward sees are in bf16; autocast would be a second mechanism for the same.
        self.native_amp = False
        self._preparing = 0

    @property
    def preparation(self) -> Preparation:
        """What shards and compiles the models of this run, with the configuration in use."""
        return self._preparation

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules; shard and compile the models.

        Args:
            args: as for `Accelerator.prepare`.
            device_placement: likewise.
        """
        self._preparing += 1
        try:
            prepared = super().prepare(*args, device_placement=device_placement)
        finally:
            self._preparing -= 1
        self._compile_prepared()
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        init: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        """Shard a model in place and, once its optimizer is known, compile it.

        Args:
            model: whole or on meta.
            device_placement: whether it is moved to the Accelerator's device first.
            evaluation_mode: leave it whole, so that ranks may call it on their own.
            init: fills one module's own parameters, for models on meta.
        """
        if evaluation_mode and not is_sharded(model):
            model = super().prepare_model(model, device_placement, evaluation_mode=True)
            _mark(model, False)  # training would take it for one that is ready
            return model
        moves = self.device_placement if device_placement is None else device_placement
        self.shard(model, init=init, device=self.device if moves else None)
        prepared = super().prepare_model(model, False, evaluation_mode)
        if prepared is not model:  # of Accelerate before 1.14, which looks at no mark
            raise ConfigError(
                f"this version of Accelerate wraps models that are prepared already, in {type(prepared).__name__}: "
                "upgrade to accelerate 1.14 or later"
            )
        if not self._preparing:
            self._compile_prepared()
        return prepared

    def shard(
        self,
        model: nn.Module,
        *,
        init: Callable[[nn.Module], object] | None = None,
        device: torch.device | None = None,
    ) -> nn.Module:
        """Shard a model in place, as `prepare` does, before its optimizer is built.

        Args:
            model: whole or on meta.
            init: fills one module's own parameters, for models on meta.
            device: where its parameters go first; None: they stay.
        """
        self._preparation.shard(model, init=init, device=device)
        # Ranks that generate until their own last token would make different numbers of forward passes.
        syncs = world_size_of() > 1 and takes_synced_gpus(model)
        run_eagerly(model, "generate", **({"synced_gpus": True} if syncs else {}))
        _mark(model, True)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Let an optimizer step shards and keep whole states in files.

        Args:
            optimizer: over the parameters of models that are prepared before it, or with it.
            device_placement: as for `Accelerator.prepare_optimizer`.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not self._preparing:
            self._compile_prepared()
        return prepared

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Give trackers values, and with them the memory, collectives and recompiles of the last step.

        Args:
            values: as for `Accelerator.log`.
            step: as there.
            log_kwargs: as there.
        """
        super().log({**values, **self._preparation.heard}, step, log_kwargs or {})

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole weights of a model, on the host of the main process; other ranks get an empty dict.

        Args:
            model: prepared; all ranks must call.
            unwrap: as for `Accelerator.get_state_dict`.
        """
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        on_each_node = self.project_configuration.save_on_each_node
        return full_state_dict(model, rank0_only=not on_each_node, cpu=True)

    def session_of(self, model: nn.Module) -> CompileSession | None:
        """Return what compiled a prepared model: its `report`, its `plan()`; None if nothing has.

        Args:
            model: prepared.
        """
        return self._preparation.session_of(model)

    def _compile_prepared(self) -> None:
        """Let the prepared optimizers follow their models, and compile models whose turn it is."""
        models = [model for model in self._models if is_sharded(model)]
        self._preparation.compile_all(models, [inner(each) for each in self._optimizers])


def _given_to(accelerator: Accelerator) -> list[Given]:
    """Return what an Accelerator was given that a configuration says as well."""
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    backend = getattr(getattr(plugin, "backend", None), "value", "NO").lower()
    given = [
        Given(
            "gradient_accumulation_steps",
            accelerator.gradient_accumulation_steps,
            "gradient_accumulation_steps",
            fills=True,
        ),
        Given(
            "bf16.enabled",
            accelerator.mixed_precision == "bf16",
            "mixed_precision == 'bf16'",
            fills=True,
        ),
        Given("fp16.enabled", False, "mixed_precision == 'fp16'"),
    ]
    if backend != "no":
        given.append(Given("compile.backend", backend, "dynamo_backend", fills=True))
    return given


def _mark(model: Any, is_prepared: bool) -> None:
    """Say whether a model is ready, so that Accelerate neither moves nor wraps it."""
    model._is_accelerate_prepared = is_prepared


def inner(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside of what Accelerate wraps around it."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_plugins(given: Mapping[str, object]) -> None:
    """Refuse arguments that ask for another system that places weights, before it is looked for.

    Raises:
        ConfigError: names it.
    """
    name = next((PLUGINS[key] for key, value in given.items() if key in PLUGINS and value), None)
    if name is not None:
        raise ConfigError(
            f"the Accelerator asks for {name} and for torchloom, which both place the weights: drop one "
            "of the two (`accelerate config` may have chosen it)"
        )


def _refuse_others(accelerator: Accelerator) -> None:
    """Refuse what would shard, cast or compile beside torchloom.

    Raises:
        ConfigError: a plugin of another system, or a precision that is not supported.
    """
    state = accelerator.state
    chosen = {name: getattr(state, name, None) for name in ("deepspeed_plugin", "fsdp_plugin")}
    _refuse_plugins({**chosen, "parallelism_config": accelerator.parallelism_config})
    launched = world_size_of()
    if accelerator.num_processes != launched:
        raise ConfigError(
            f"{launched} ranks were launched, and the Accelerator takes this process for one of "
            f"{accelerator.num_processes}: each would read the whole data and write the files. On CPUs pass cpu=True "
            "(use_cpu=True to a Trainer); elsewhere start all ranks with torchrun or `accelerate launch`"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"mixed_precision={accelerator.mixed_precision!r} is not supported, as its loss scaler looks at one "
            "rank's shards: use mixed_precision='bf16'"
        )


__all__ = ["TorchloomAccelerator"]
