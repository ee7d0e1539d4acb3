"""`torchloom.compile` compiles a sharded model in the user's own loop, as an engine does, and follows the loop's steps."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchloom.config import Config, load_config
from torchloom.config.findings import Findings
from torchloom.config.frozen import thaw
from torchloom.config.schema_sections import CompileSection
from torchloom.config.source import read
from torchloom.errors import ConfigError
from torchloom.log import get_logger
from torchloom.loop.clip import take_norm
from torchloom.loop.elementwise import may_step_by_parts
from torchloom.loop.offloads import Offloads
from torchloom.loop.optimizer_hooks import after_steps_of, settle
from torchloom.loop.optimizer_list import StepsInTurn, members_of
from torchloom.loop.optimizers import config_facts
from torchloom.loop.owner_memory import memory_of
from torchloom.loop.ownership import ownership_of
from torchloom.loop.plan_check import PlanCheck, standing_bytes
from torchloom.loop.shard_model import ConfigSource, log_notes, warn_of_monitors
from torchloom.loop.slices import as_slices
from torchloom.loop.step_log import StepLog, Work
from torchloom.loop.trackers import LogMetrics, Tracker, tracker_of
from torchloom.memory.measure import device_bytes
from torchloom.pipeline import CompileSession, PassItem, Schedule
from torchloom.runtime import Communicator, lookup, use_shared_memory
from torchloom.runtime.exchanges import new_agreement
from torchloom.shard import Layout, layout_of, whole_states
from torchloom.step import CompileCall, CompiledStep, Driver, build_step, describe_step
from torchloom.step.interfaces import STATES

logger = get_logger(__name__)

_SECTIONS = ("compile", "zero_optimization", "gradient_accumulation_steps", "torch_autocast")
"""What of a whole config means something here; the loop does the rest."""


def compile_model(
    model: nn.Module,
    *,
    config: ConfigSource | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    backend: str | Callable[..., Any] | None = None,
    passes: Sequence[PassItem] | None = None,
    schedule: Schedule | None = None,
    strict: bool = False,
    log_to: LogMetrics | None = None,
    **compile_kwargs: Any,
) -> CompileSession:
    """Compile a sharded model in place, as `engine.compile()` does. All ranks must call.

    Args:
        model: a model that `shard_model` or `initialize` sharded.
        config: keys of the section `compile`, as `torchloom.initialize` takes them, such as
            `{"memory_budget": "40GB"}`. Or a whole config, as a dict or the path of a file, of which these
            sections count: `compile`, `zero_optimization` (sizes of buckets), `torch_autocast` and
            `gradient_accumulation_steps`. Or what `torchloom.config.load_config` returned.
        optimizer: steps the model's parameters. A memory budget needs it, as its states take memory. Its
            steps move the schedule; without it the steps of any optimizer over these parameters do. Or several, such as
            Muon and AdamW, in the order in which the loop steps them: those of the last one move the schedule.
        backend: as for `Engine.compile`.
        passes: names, passes or functions instead of the stage's preset.
        schedule: as for `Engine.compile`.
        strict: raise when weaving fails instead of running eagerly.
        log_to: called on rank 0 as `log_to(metrics, step)` after each step of the optimizer, such as `wandb.log`;
            see `Engine.log_to`. Of a loop without an engine, the loss and tokens are not known.
        compile_kwargs: more arguments for `torch.compile`.

    Returns:
        The session: `report` records what was woven, `plan()` returns the memory plan.

    Raises:
        ConfigError: a key is wrong, or asks for what an own loop cannot do.
        ShardError: the model is not sharded.
        PlanError: the memory used between steps alone exceeds the budget; or there is a budget, and the optimizer sees
            parameters whole and cannot be tried without data.
        AgreementError: the ranks were given different passes or options.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters())  # doctest: +SKIP
        >>> torchloom.compile(  # doctest: +SKIP
        ...     model, config={"memory_budget": "40GB"}, optimizer=optimizer
        ... )
    """
    _refuse_keys(compile_kwargs)
    trackers = [] if log_to is None else [tracker_of(log_to, 1, "")]
    layout = layout_of(model)
    settings = _settings(config, layout, strict)
    if layout.stage == 1:  # clipping in a loop reads whole gradients
        disabled = (*settings.compile.disable_passes, "zero1")
        settings = replace(settings, compile=replace(settings.compile, disable_passes=disabled))
    log_notes(settings)
    stepping: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    stepping = [each for each in stepping if each is not None]
    _check(settings, model, stepping)
    known: Any = StepsInTurn(stepping) if len(stepping) > 1 else next(iter(stepping), None)
    comm = lookup(layout.handle)
    agreement = new_agreement(dist.get_rank(), dist.get_world_size())
    agreement.check_facts(
        "the config of torchloom.compile",
        {**config_facts(settings), "optimizer": [type(each).__qualname__ for each in stepping]},
    )
    if settings.compile.symmetric_memory:
        use_shared_memory(comm)
    device = next(model.parameters(), torch.empty(0)).device
    # The loop's own optimizer steps shards wherever they are: nothing is streamed for it.
    host = Offloads(settings, model, layout, None, device)
    steps = LoopSteps(
        model,
        known,
        comm,
        device,
        micro_steps=settings.batch.accumulation_steps,
        trackers=trackers if dist.get_rank() == 0 else [],
    )
    driver = Driver(
        ranks=agreement,
        host=host,
        optimizer=known,
        as_shards=functools.partial(as_slices, model),
        before_forward=steps.forward,
        may_keep=known is not None,
        name="torchloom.compile",
    )
    call = CompileCall(
        backend=backend,
        compile_kwargs=compile_kwargs,
        passes=passes,
        schedule=schedule,
        name="torchloom.compile",
        reads_logits=True,
    )
    compiled = compile_step(settings, call, model, comm, device, driver, may_stream=False)
    last = stepping[-1] if stepping else None
    after_steps_of(model, last, functools.partial(steps.ended, compiled), "step")
    for each in stepping:
        if isinstance(each, Optimizer):  # not a wrapper, whose own states are its own
            whole_states(each)
    return compiled.session


def compile_step(
    config: Config,
    call: CompileCall,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    driver: Driver,
    *,
    may_stream: bool = True,
) -> CompiledStep:
    """Describe and build the compiled step of an engine or a loop. All ranks must call.

    Args:
        config: the run's settings.
        call: the arguments of the user's call.
        model: sharded; compiled in place.
        comm: of its ranks.
        device: where it computes.
        driver: steps it.
        may_stream: whether its optimizer's states may stream from the host.
    """
    driver = replace(
        driver,
        owned_memory=memory_of(driver.optimizer),
        by_parts=may_step_by_parts(driver.optimizer),
    )
    total_bytes = driver.ranks.least("the device's memory", device_bytes(device))
    description = describe_step(config, call, model, comm, device, total_bytes=total_bytes)
    if not may_stream and any(each.name == STATES for each in description.timetable.all_passes):
        raise ConfigError(
            f"pass {STATES!r} streams optimizer states through engine.step(), which a loop of one's "
            "own does not call: remove it, or train with torchloom.initialize"
        )
    compiled = build_step(description, model, comm, driver)
    compiled.session.report.owners = tuple(
        told
        for each in members_of(driver.optimizer)
        for told in ownership_of(each).chosen()
        if told.parameters or told.num_divided
    )
    return compiled


def _refuse_keys(compile_kwargs: Mapping[str, Any]) -> None:
    """Refuse keys of the config among the arguments of `torch.compile`."""
    for name, value in compile_kwargs.items():
        if name in CompileSection.keys:
            raise ConfigError(
                f"{name!r} is a key of the config, no argument of torch.compile: write "
                f"torchloom.compile(model, config={{{name!r}: {value!r}}})"
            )


def _settings(config: ConfigSource | None, layout: Layout, strict: bool) -> Config:
    """Return the config of a loop: its keys of `compile`, or a whole one of which parts count."""
    if isinstance(config, Config):
        found = config
        warn_of_monitors(found, "torchloom.compile")
    else:
        if config is None or (isinstance(config, Mapping) and not config.keys() & set(_SECTIONS)):
            config = {"compile": dict(config or {})}
        tree = tree_of(config)
        others = [name for name in tree if name not in _SECTIONS]
        if others and dist.get_rank() == 0:
            logger.warning(
                "torchloom.compile has no use for %s of the config: a loop of one's own does these itself",
                ", ".join(others),
            )
        zero = {"stage": layout.stage, **(tree.get("zero_optimization") or {})}
        tree["zero_optimization"] = zero
        found = load_config(tree, world_size=dist.get_world_size())
    if found.zero.stage != layout.stage:
        raise ConfigError(
            f"zero_optimization.stage is {found.zero.stage}, but this model is sharded at stage "
            f"{layout.stage}: make them equal, or remove the key"
        )
    return replace(found, compile=replace(found.compile, strict=strict or found.compile.strict))


def tree_of(source: ConfigSource) -> dict[str, Any]:
    """Return a configuration as it was written.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(source, Config):
        return dict(thaw(source.source))  # type: ignore[call-overload]
    findings = Findings()
    tree = dict(read(source, findings).tree)
    if findings.errors:
        load_config(source)  # raises, and tells all errors
    return tree


def _check(settings: Config, model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Refuse what a loop without an engine cannot keep."""
    trained = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"optimizer= of torchloom.compile is a {type(optimizer).__name__}: pass a torch optimizer, or a list of these"
            )
        if trained.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}, optimizer= of torchloom.compile, steps none of this model's parameters: build "
                "it from model.parameters() of the model that you compile"
            )
    if optimizers:
        return
    if settings.compile.memory_budget is not None:
        raise ConfigError(
            "compile.memory_budget counts optimizer states: pass optimizer= to torchloom.compile"
        )
    if settings.compile.plan is not None:
        raise ConfigError(
            "compile.plan may keep weights gathered until the optimizer steps: pass optimizer= to "
            "torchloom.compile"
        )


class LoopSteps:
    """The steps of one loop: told before each forward and after each step of the optimizer.

    It advances the schedule of passes, and tells recorders and trackers of each step.

    Args:
        model: the loop's; it is not held.
        optimizer: the loop's, whose learning rate is told; None: not known. It is not held.
        comm: counts collectives.
        device: of the model.
        micro_steps: forward and backward passes of an optimizer step.
        trackers: told of each step, beside recorders.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | StepsInTurn | None,
        comm: Communicator,
        device: torch.device,
        *,
        micro_steps: int,
        trackers: list[Tracker],
    ) -> None:
        # Parameters may lead to the model, which this must not keep alive.
        self._model = weakref.ref(model)
        self._optimizer: Callable[[], Any] | None = (
            None if optimizer is None else weakref.ref(optimizer)
        )
        self._comm = comm
        self._log = StepLog(
            device,
            comm,
            Work(flops_per_token=None, peak_tflops=None),
            PlanCheck(device, micro_steps, times=False),
            self._standing_bytes,
            trackers,
        )
        self._log.restart(time.perf_counter())
        self._step = 0
        self._num_forwards = self._num_forwards_before = 0
        """Of this step so far, and of the step before."""
        self._measured = contextlib.ExitStack()
        """Open while a step is measured."""
        # A process that ends under torch's profiler dies of SIGSEGV (torch 2.13).
        weakref.finalize(self, self._measured.close)
        self._batch: list[tuple[StorageWeakRef, int]] = []
        """Memory of the step's first batch, with its bytes, where the step is measured."""

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take in that a forward pass of the compiled model begins.

        Args:
            args: of the forward call.
            kwargs: of the forward call.
        """
        model = self._model()
        if model is not None:
            settle(model)
        if not torch.is_grad_enabled():
            self._log.check.meter = None
            self._measured.close()
            return
        self._comm.residents.invalidate()
        self._num_forwards += 1
        self._log.begin(args, kwargs)
        self._measured.close()
        meter = self._log.check.meter
        if self._num_forwards == 1:
            batch = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            self._batch = [] if meter is None else [_storage_of(each) for each in batch]
        elif self._num_forwards > self._num_forwards_before:
            self._log.check.meter = meter = None  # an evaluation, which no step may follow
        if meter is not None:
            # A profiler does not see that memory from before it is freed.
            meter.live_bytes -= sum(size for ref, size in self._batch if ref.expired())
            self._batch = [each for each in self._batch if not each[0].expired()]
            self._measured.enter_context(meter.phase("step"))

    def ended(self, compiled: CompiledStep) -> None:
        """Take in that the optimizer has stepped.

        Args:
            compiled: the loop's model.
        """
        self._measured.close()
        self._step += 1
        self._num_forwards, self._num_forwards_before = 0, self._num_forwards
        known = None if self._optimizer is None else self._optimizer()
        if known is not None:
            self._log.updating(known, None, self._step)
        compiled.advance(self._step)
        norm = take_norm(self._comm.handle)
        self._log.ended(compiled.session, step=self._step, norm=norm)

    def _standing_bytes(self) -> int:
        model = self._model()
        optimizer = None if self._optimizer is None else self._optimizer()
        return 0 if model is None else standing_bytes(model, optimizer, self._comm)


def _storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()
