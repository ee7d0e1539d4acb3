"""Lightning and Fabric: strategies that shard and compile in the place of DistributedDataParallel.

    import torchloom.integrations.lightning                      registers the name
    Trainer(strategy="torchloom", devices=2)                     or TorchloomStrategy("ds_config.json")
    Fabric(strategy=TorchloomFabricStrategy("ds_config.json"))

Written for lightning 2.6. A Trainer calls `training_step`, not `forward`: each module of the LightningModule that
owns parameters is sharded and compiled on its own, and `training_step` runs eagerly around them. So what the step
does beside the model (logging, metrics) is in no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.optim import Optimizer

from torchloom.errors import ConfigError, ShardError
from torchloom.integrations.given import Given
from torchloom.integrations.prepare import Preparation
from torchloom.loop.compile import ConfigSource, tree_of
from torchloom.pipeline import CompileSession
from torchloom.shard import full_optimizer_state_dict, full_state_dict, is_sharded
from torchloom.shard.roots import sharded_models

UNUSED: Mapping[str, str] = {
    "optimizer": "Lightning steps the optimizer that you built",
    "scheduler": "Lightning steps the schedule that you built",
}
"""Keys that these strategies do not read, and what counts instead."""

NOT_BROADCAST = "_ddp_params_and_buffers_to_ignore"
"""Names that `DDPStrategy.setup` leaves as they are on each rank before it validates, tests or predicts."""


class _Prepared:
    """What both strategies do before a run: they read the configuration, and refuse what does not fit."""

    def __init__(
        self,
        torchloom: ConfigSource | None = None,
        *,
        auto: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        options: Mapping[str, object] = self._ddp_kwargs  # type: ignore[attr-defined]
        if options:
            raise ConfigError(
                f"{type(self).__name__} takes no {', '.join(sorted(options))}: nothing is wrapped in "
                "DistributedDataParallel, and parameters that no rank uses need no option, while those that only some "
                "ranks use have to be run on every rank"
            )
        self._source = None if torchloom is None else tree_of(torchloom)  # a file is read now
        self._auto = auto or {}
        self._preparation: Preparation | None = None

    def _prepare(
        self, precision: object, given: list[Given], unused: Mapping[str, str]
    ) -> Preparation:
        caller = type(self).__name__
        if precision == "16-mixed":
            raise ConfigError(
                f"precision={precision!r} with {caller} is not supported, as its loss scaler looks at one rank's "
                "shards: use precision='bf16-mixed'"
            )
        return Preparation(self._source, given=given, auto=self._auto, caller=caller, unused=unused)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make `strategy="torchloom"` work; importing this module has done so.

        Args:
            strategy_registry: of Lightning, or of Fabric.
        """
        strategy_registry.register("torchloom", cls, description="ZeRO under torch.compile")


class TorchloomStrategy(_Prepared, DDPStrategy):
    """A Lightning strategy whose modules are sharded and compiled by torchloom.

    Checkpoints are those of an unsharded module and load on any number of ranks, with or without torchloom.
    `precision="bf16-mixed"` is Lightning's autocast, as in its own DDP runs; `{"bf16": {"enabled": true}}` in the
    configuration, with `precision="32-true"`, also communicates in bf16.

    Args:
        torchloom: a DeepSpeed-shaped configuration: a dict or the path of a file. "auto" is filled in from the
            Trainer; default: stage 3.
        auto: more values for "auto", by dotted path.
        kwargs: as for `DDPStrategy`, without the options of DistributedDataParallel itself.

    Raises:
        ConfigError: the configuration is wrong, contradicts the Trainer, or asks for fp16.

    Example:
        >>> strategy = TorchloomStrategy({"zero_optimization": {"stage": 3}})  # doctest: +SKIP
        >>> Trainer(strategy=strategy, devices=2).fit(module, loader)  # doctest: +SKIP
    """

    @property
    def preparation(self) -> Preparation | None:
        """What shards and compiles, with the configuration in use; None before a run."""
        return self._preparation

    @property
    def _module(self) -> nn.Module:
        """The LightningModule of the run that this strategy is in."""
        assert self.lightning_module is not None
        return self.lightning_module

    def setup(self, trainer: LightningTrainer) -> None:
        """Shard and compile the modules, and create the optimizers over their shards.

        Args:
            trainer: whose arguments fill in what is "auto" in the configuration.
        """
        _refuse_averages(trainer, type(self).__name__)
        if self._preparation is None:
            precision = self.precision_plugin.precision
            self._preparation = self._prepare(precision, _given_to(trainer, precision), UNUSED)
        if trainer.loggers:
            self._preparation.hear()
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Shard the modules, where the base class wraps them."""
        for root in roots_of(self._module):
            self._prepared.shard(root)
        self._module.__dict__[NOT_BROADCAST] = [name for name, _ in self._module.named_parameters()]

    def setup_optimizers(self, trainer: LightningTrainer) -> None:
        """Create the optimizers over shards, then compile the modules that they step.

        Args:
            trainer: as for `Strategy.setup_optimizers`.
        """
        super().setup_optimizers(trainer)
        self._prepared.compile_all(
            list(roots_of(self._module)), [_inner(each) for each in self.optimizers]
        )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step, and give loggers collectives, recompiles and so on of the step before.

        Args:
            optimizer: as for `Strategy.optimizer_step`.
            closure: as there.
            model: as there.
            kwargs: as there.
        """
        trainer: Any = self._module.trainer
        heard = self._prepared.heard
        if heard and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(dict(heard), step=trainer.global_step)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights, on the host of rank 0; other ranks get an empty dict. All ranks must call."""
        if not any(is_sharded(root) for root in roots_of(self._module)):
            return super().lightning_module_state_dict()
        return full_state_dict(self._module, rank0_only=True, cpu=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return whole states, on the host of rank 0; other ranks get an empty dict. All ranks must call.

        Args:
            optimizer: one of `optimizers`, or Lightning's wrapper around it.
        """
        return full_optimizer_state_dict(_inner(optimizer), rank0_only=True, cpu=True)

    def sessions(self) -> dict[str, CompileSession]:
        """Return what compiled each module, by its name in the LightningModule; nothing before a run."""
        if self.lightning_module is None:
            return {}
        names = {module: name for name, module in self._module.named_modules()}
        roots = list(roots_of(self._module))
        found = {names[root]: self._prepared.session_of(root) for root in roots}
        return {name: session for name, session in found.items() if session is not None}

    @property
    def _prepared(self) -> Preparation:
        if self._preparation is None:
            raise ShardError(f"{type(self).__name__} has no run yet: call trainer.fit first")
        return self._preparation


class TorchloomFabricStrategy(_Prepared, FabricDDPStrategy):
    """A Fabric strategy whose modules are sharded and compiled by torchloom.

    Args:
        torchloom: as for `TorchloomStrategy`.
        auto: likewise.
        kwargs: as for Fabric's `DDPStrategy`, without the options of DistributedDataParallel itself.

    Raises:
        ConfigError: the configuration is wrong, or asks for fp16.

    Example:
        >>> fabric = Fabric(strategy=TorchloomFabricStrategy(), devices=2)  # doctest: +SKIP
        >>> model, optimizer = fabric.setup(model, optimizer)  # doctest: +SKIP
    """

    def __init__(self, torchloom: ConfigSource | None = None, **kwargs: Any) -> None:
        super().__init__(torchloom, **kwargs)
        self._roots: list[nn.Module] = []
        self._backward_sync_control = _EachBackwardReduces()  # type: ignore[assignment]

    @property
    def preparation(self) -> Preparation:
        """What shards and compiles, with the configuration in use."""
        if self._preparation is None:
            precision = self.precision.precision
            unused = {**UNUSED, "gradient_clipping": "call fabric.clip_gradients() in the loop"}
            self._preparation = self._prepare(precision, _given_by_precision(precision), unused)
        return self._preparation

    def setup_module(self, module: nn.Module) -> Any:
        """Shard a module in place and compile it, where the base class wraps it.

        Args:
            module: whole, or sharded before.
        """
        self._shard(module)
        self.preparation.compile_all(self._roots, [])
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module and compile it, once its optimizers are known.

        Args:
            module: whole, or sharded before.
            optimizers: over its parameters.
            scheduler: returned as it is.
        """
        self._shard(module)
        self.preparation.compile_all(self._roots, [_inner(each) for each in optimizers])
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer step shards and keep whole states, and compile what waited for it.

        Args:
            optimizer: over parameters of modules that were set up.
        """
        self.preparation.compile_all(self._roots, [_inner(optimizer)])
        return optimizer

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights, on the host of rank 0; other ranks get an empty dict. All ranks must call.

        Args:
            module: as for `Strategy.get_module_state_dict`.
        """
        if not any(is_sharded(root) for root in roots_of(module)):
            return super().get_module_state_dict(module)
        return full_state_dict(module, rank0_only=True, cpu=True)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return whole states, on the host of rank 0; other ranks get an empty dict. All ranks must call.

        Args:
            optimizer: as for `Strategy.get_optimizer_state`.
        """
        return full_optimizer_state_dict(_inner(optimizer), rank0_only=True, cpu=True)

    def session_of(self, module: nn.Module) -> CompileSession | None:
        """Return what compiled a module that was set up; None if nothing has.

        Args:
            module: what `fabric.setup` returned, or the module in it.
        """
        return self.preparation.session_of(getattr(module, "module", module))

    def _shard(self, module: nn.Module) -> None:
        roots = list(roots_of(module)) if isinstance(module, LightningModule) else [module]
        for root in roots:
            self.preparation.shard(root)
        known = {id(root) for root in self._roots}
        self._roots += [root for root in roots if id(root) not in known]


class _EachBackwardReduces:
    """What `fabric.no_backward_sync` asks: gradients of shards are reduced in each backward, and add up the same."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Hold nothing back."""
        return nullcontext()


def roots_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are sharded and compiled, each on its own.

    They are the nearest ones that own parameters and that have a forward to be called: of a LightningModule its
    children, of a ModuleList its items.

    Args:
        module: a LightningModule or a model; one that is sharded itself is the only root.

    Raises:
        ShardError: parameters stand where no forward could gather them.
    """
    is_root = any(module is root for root in sharded_models())
    if is_root or not (_is_container(module) or isinstance(module, LightningModule)):
        if any(True for _ in module.parameters()):
            yield module
        return
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ShardError(
            f"{type(module).__name__} owns the parameter {own[0]!r} itself, and Lightning calls no forward of it "
            "that could gather it: move the parameter into a module of its own"
        )
    for child in module.children():
        yield from roots_of(child)


def _is_container(module: nn.Module) -> bool:
    """Say whether a module has no forward of its own."""
    return type(module).forward is nn.Module.forward


def _inner(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside of Lightning's or Fabric's wrapper."""
    wrapped = getattr(optimizer, "_optimizer", None) or optimizer
    return getattr(wrapped, "optimizer", wrapped)


def _given_to(trainer: LightningTrainer, precision: object) -> list[Given]:
    """Return what a Trainer was given that a configuration says as well."""
    steps = trainer.accumulate_grad_batches
    given = [
        *_given_by_precision(precision),
        Given("gradient_accumulation_steps", steps, "accumulate_grad_batches", fills=True),
    ]
    if trainer.gradient_clip_algorithm in (None, "norm"):
        clip = float(trainer.gradient_clip_val or 0.0)
        given.append(Given("gradient_clipping", clip, "gradient_clip_val", fills=True))
    return given


def _given_by_precision(precision: object) -> list[Given]:
    """Return what `precision` says: bf16 of the configuration beside Lightning's would be a second mechanism."""
    casts = "bf16" in str(precision)
    name = (
        f"precision={precision!r}, which casts already, so bf16.enabled" if casts else "precision"
    )
    return [
        Given("bf16.enabled", False, name, must_match=casts),
        Given("fp16.enabled", False, "precision == '16-mixed'"),
    ]


def _refuse_averages(trainer: LightningTrainer, caller: str) -> None:
    """Refuse callbacks that copied the whole model before it was sharded.

    Raises:
        ConfigError: names the callback.
    """
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} keeps a copy of the model from before it is sharded, which {caller} cannot "
                "step with: drop it, or copy shards yourself after the start (copy.deepcopy in on_train_start)"
            )


TorchloomStrategy.register_strategies(StrategyRegistry)
TorchloomFabricStrategy.register_strategies(FABRIC_REGISTRY)

__all__ = ["TorchloomFabricStrategy", "TorchloomStrategy", "roots_of"]
