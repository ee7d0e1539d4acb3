"""The engine: one training step after another over a sharded model.

    loss = engine(batch)       forward, with inputs cast to the compute dtype
    engine.backward(loss)      scaled by loss scale and accumulation; gradients are averaged
    engine.step()              at the accumulation boundary: clip, step, publish, schedule, zero

The calls and their names are DeepSpeed's. The engine holds no weights of its own: the model is the
caller's, sharded in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.module_calls import forget_compiled_call
from torchloom.compiler.support import check_supported
from torchloom.config import Config
from torchloom.engine import compiling, export
from torchloom.engine.boundary import (
    Boundary,
    check_step,
    print_progress,
    reduces_at_boundary,
)
from torchloom.engine.checkpoints import Checkpoints, Counters, Options
from torchloom.engine.checkpoints.write import Request
from torchloom.engine.groups import World
from torchloom.engine.local import LocalParams
from torchloom.engine.loss import check_loss
from torchloom.engine.offloads import Offloads
from torchloom.engine.precision import autocasting, cast_inputs, dtype_of
from torchloom.engine.rates import note_rates
from torchloom.engine.scaling import LossScaler
from torchloom.engine.shared_loss import Scaling, SharedLoss
from torchloom.engine.timers import Timers
from torchloom.engine.update import Update
from torchloom.errors import unwrapped
from torchloom.exchange import Agreement
from torchloom.log import get_logger
from torchloom.pipeline import (
    REGISTRY,
    CompileReport,
    PassContract,
    PassItem,
    PassRegistry,
    Schedule,
)
from torchloom.plan import Plan
from torchloom.position import POSITION
from torchloom.runtime import Account, CommStats, MoveStats, mover_of, tell_step
from torchloom.shard import layout_of, owners_of, unshard
from torchloom.step import CompileCall, CompiledStep

logger = get_logger(__name__)

_SERIALS = itertools.count(1)
_SHARED_LOSS = SharedLoss()


class Engine:
    """Drives forward, backward and step of one sharded model; made by `torchloom.initialize`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        world: World,
        local: LocalParams,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        agreement: Agreement,
    ) -> None:
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.world = world
        self.local = local
        self._agreement = agreement
        self.scaler = LossScaler(
            config.precision.loss_scale if config.precision.scales_loss else None,
            config.non_finite.max_consecutive_skips,
        )
        self._serial = next(_SERIALS)
        self._comm_before = world.comm.stats()  # an earlier model may have had this communicator
        self._checkpoints = Checkpoints(agreement)
        self._compiled: CompiledStep | None = None
        self._passes = PassRegistry(REGISTRY)
        self._account = Account()
        with self._account.charged():
            self.offloads = Offloads(config, model, layout_of(model), optimizer, world.device)
        self._update = Update(config, local, world.comm, self.scaler, self.offloads)
        self._boundary = Boundary(config.batch.accumulation_steps)
        self._num_backwards = 0
        self._share = _SHARED_LOSS.join(local)
        self._step_applied = False
        self.timers = Timers(config.wall_clock_breakdown, world.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, under `torch_autocast`; floating-point inputs are cast to the compute dtype."""
        dtype = dtype_of(self.config.precision.dtype)
        if dtype is not torch.float32:
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        self._take_place()
        self._update.settle()
        autocast = autocasting(self.config.precision, self.device)
        with self.timers.measure("forward"), unwrapped(), autocast, self._account.charged():
            return self.module(*args, **kwargs)

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute gradients of a scalar loss; they add up until the accumulation boundary.

        Args:
            loss: a tensor with one element, made by this engine's model.
            retain_graph: keep the autograd graph for another backward.
            scale_wrt_gas: divide by the accumulation steps, so that accumulated gradients are a
                mean over micro-steps.

        Returns:
            The loss as it was handed in, divided by the accumulation steps if asked.

        Raises:
            EngineError: the loss is not a scalar, or does not depend on the model's parameters.
        """
        check_loss(loss)
        self._take_place()
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss * self.scaler.scale if self.scaler.scale != 1.0 else loss
        shared = _SHARED_LOSS.backward(self._share, self._scaling)
        with self.timers.measure("backward"), unwrapped(), shared, self._account.charged():
            scaled.backward(retain_graph=retain_graph)
        self._num_backwards += 1
        POSITION.backwards += 1
        self._update.losses.append(loss.detach())
        self.global_samples += self.config.batch.micro_batch_size * self.world.world_size
        return loss

    def step(self) -> None:
        """Finish a micro-step; at the accumulation boundary, update the weights.

        At the boundary gradients are clipped to `gradient_clipping`, the optimizer and the schedule
        step, and gradients are dropped. A step whose gradients are not finite leaves weights and
        optimizer alone on all ranks; `non_finite` in the config says what comes of it:

            skip     counted (`skipped_steps`), logged with rank and parameter; the run goes on
            raise    NonFiniteError, at once
            stop     as skip, and `should_stop` is true from then on

        Raises:
            EngineError: no backward pass since the last step, or there is no optimizer.
            NonFiniteError: by `raise`; after `max_consecutive_skips`; or called after `stop`.
        """
        if self._share.check(self._scaling) and not self._num_backwards:
            self._num_backwards = 1
        optimizer = check_step(self._num_backwards, self.optimizer)
        self._take_place()
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:  # what is refused is no step: it may be taken once it is put right
            self.local.check(owners_of(self.module))
        self.micro_steps += 1
        self._step_applied = False
        self._num_backwards = 0
        if is_boundary:
            note_rates(optimizer)
            with self.timers.measure("step"), self._account.charged():
                self._step_applied = self._update.apply(
                    optimizer,
                    self.lr_scheduler,
                    reduce=reduces_at_boundary(layout_of(self.module)),
                    step=self.global_steps,
                )
            self.global_steps += 1
            self.timers.step = self.global_steps
            self._take_place()
            tell_step(self.global_steps)
            with self._account.charged():
                compiling.advance(self._compiled, self.global_steps)
            print_progress(self)
            self._checkpoints.after_step(self.global_steps)
        self._share.forget()

    @property
    def _scaling(self) -> Scaling:
        """What this engine's losses are divided and multiplied by."""
        return Scaling(self.gradient_accumulation_steps(), self.scaler.scale)

    def _take_place(self) -> None:
        """Let what follows be done by this engine in its present step, as all ranks compare it."""
        POSITION.actor, POSITION.step = self._serial, self.global_steps

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave the gradients of micro-steps inside unsynchronised; they add up locally.

        Raises:
            EngineError: gradients are sharded (stages 2, 3) or averaged inside compiled graphs.
        """
        return self._boundary.held_off(layout_of(self.module))

    def zero_grad(self) -> None:
        """Drop all gradients that have accumulated."""
        self.local.zero_grad()
        self._update.losses.clear()
        self._share.forget()

    def register_compile_pass(
        self, name: str, fn: Callable[..., Any], contract: PassContract | None = None
    ) -> None:
        """Give a pass a name that this engine's schedules can use.

        Other engines do not know the pass.

        Args:
            name: the name.
            fn: the pass; see `torchloom.register_compile_pass` for its arguments.
            contract: what it needs and provides.

        Raises:
            PassOrderError: the name is one of torchloom's.
            PassError: the function has a parameter that no form of a pass has.
        """
        self._passes.register(name, fn, contract)

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        compiled_autograd_enabled: bool = False,
        passes: Sequence[PassItem] | None = None,
    ) -> None:
        """Compile the model in place, with sharding and communication woven into its graphs.

        Args:
            backend: "inductor" (default), "aot_eager", "eager", any registered backend, a path
                "package.module.function", or a callable `(gm, example_inputs) -> callable`.
            compile_kwargs: more arguments for `torch.compile`, e.g. `{"dynamic": True}`.
            schedule: `[(step, [pass, ...]), ...]`: what runs from an optimizer step on. A pass is a
                name, a function, a `GraphPass`, or a pair of one of them and a memory budget.
            compiled_autograd_enabled: no effect, as backward graphs are compiled with the forward.
            passes: passes to run from the start, instead of the stage's preset or a schedule.

        Raises:
            CompileError: torch.compile does not work here.
            ConfigError: the backend cannot be found, or both passes and a schedule are given.
            EngineError: the engine is compiled already.
            PassOrderError: the passes are unknown, contradict each other, or lack what they need.
            AgreementError: the ranks were given different passes or options.
        """
        check_supported()
        if self._compiled is not None:
            asks = backend or compile_kwargs or passes or schedule
            compiling.refuse_second(bool(asks), self.config.compile.enabled)
            return
        call = CompileCall(
            backend=backend,
            compile_kwargs=compile_kwargs,
            passes=passes,
            schedule=schedule,
            registry=self._passes,
        )
        if compiled_autograd_enabled:
            logger.warning("compiled_autograd_enabled has no effect: backward graphs are compiled")
        if self.gradient_accumulation_steps() == 1:
            self.local.average_in_backward(self.module)
        with self._account.charged():
            self._compiled = compiling.compile_engine(self, self._agreement, call)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` has been called."""
        return self._compiled is not None

    def is_deepcompile_enabled(self) -> bool:
        """Whether the config asks for weaving."""
        return self.config.compile.deepcompile

    def is_deepcompile_active(self) -> bool:
        """Whether the model runs woven: `compile()` has been called."""
        return self.is_compiled

    def compile_report(self) -> CompileReport:
        """Return what was captured, woven, taken from caches or left eager so far."""
        return CompileReport() if self._compiled is None else self._compiled.session.report

    def plan(self) -> Plan:
        """Return what was planned for the graphs compiled so far; see `compile.memory_budget`."""
        return compiling.plan_of(self._compiled, self.world)

    def get_compile_time(self) -> list[tuple[str, int, int, float]]:
        """Return `("fwd" or "bwd", place, graph id, seconds)` of each compiled graph."""
        return self.compile_report().compile_time

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.world.world_size

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps left out because gradients were not finite."""
        return self.scaler.num_skipped

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end: `non_finite: stop` has dropped a step, on all ranks alike."""
        return self._update.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Which step was dropped, and which gradient was not finite; None while the run goes on."""
        return self._update.stop_reason

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (1.0 unless fp16)."""
        return self.scaler.scale

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the model's parameters (shards, where sharded)."""
        return self.module.parameters()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._boundary.is_next(self.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step()` updates the weights, instead of counting micro-steps."""
        self._boundary.forced = is_boundary

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before clipping of the last step; None if nothing asked for it.

        It is computed in every step, unless clipping is off and `bf16.check_grad_overflow` false; a
        step that was skipped has none.
        """
        norm = self._update.norm
        return None if norm is None else float(norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [g["lr"] for g in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights."""
        return self._step_applied

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.config.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward pass of one rank."""
        return self.config.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self.config.batch.accumulation_steps

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero.stage

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.config.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.config.precision.dtype == "bf16"

    def comm_stats(self) -> CommStats:
        """Return how many collectives this rank has begun, and the bytes of their full tensors."""
        return self.world.comm.stats().since(self._comm_before)

    def move_stats(self) -> MoveStats:
        """Return what this engine has moved between device and host, and its host memory, in bytes."""
        return mover_of(self.world.device).stats(self._account)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool | None = None,
        keep_last: int | None = None,
    ) -> str:
        """Write all that a run needs to go on exactly; all ranks must call. See docs/checkpoints.md.

        Args:
            save_dir: folder of all checkpoints of the run, shared by all ranks.
            tag: the checkpoint's own folder name, replaced at once if it exists; default
                `global_step<N>`.
            client_state: the caller's plain values and tensors, given back by `load_checkpoint`.
            save_latest: let a load without a tag take this checkpoint.
            exclude_frozen_parameters: leave parameters that need no gradient out.
            async_save: go on when all is copied to host memory; a failure is raised by a later
                `step`, `save_checkpoint`, `load_checkpoint` or `wait_for_checkpoint`. Default: the
                config's `checkpoint.async_save`.
            keep_last: afterwards remove all but so many of the checkpoints with `save_latest`;
                default: the config's `checkpoint.keep_last`.

        Returns:
            The path of the checkpoint, which appears under this name only when complete.

        Raises:
            CheckpointError: it cannot be written, or something in it cannot be kept; on every rank.
                What was under the tag is still there, and training can go on.

        Example:
            >>> engine.save_checkpoint("runs/a", client_state={"epoch": 3})  # doctest: +SKIP
            'runs/a/global_step100'
        """
        defaults = self.config.checkpoint
        keep = defaults.keep_last if keep_last is None else keep_last
        name = f"global_step{self.global_steps}" if tag is None else tag
        counters = Counters(
            self.global_steps,
            self.global_samples,
            self.micro_steps,
            self._num_backwards,
            self._boundary.forced,
        )
        return self._checkpoints.save(
            self,
            Request(Path(save_dir), name, save_latest, keep),
            counters,
            client_state or {},
            exclude_frozen=exclude_frozen_parameters,
            in_background=defaults.async_save if async_save is None else async_save,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is saved in the background is there.

        Raises:
            CheckpointError: it could not be written; on every rank.
        """
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Continue from a checkpoint, also one saved by another number of ranks or another stage.

        All files are verified, and all that is needed is read, before anything is changed.

        Args:
            load_dir: folder of all checkpoints of the run.
            tag: which one; default: the newest that verifies.
            load_module_strict: the checkpoint must hold exactly this model's parameters.
            load_optimizer_states: load the optimizer's states as well.
            load_lr_scheduler_states: load the schedule's position as well.
            load_module_only: load weights and buffers alone; counters, generators and the rest stay.
            custom_load_fn: called with `src`, a dict of whole weights, and `dst`, the model with
                whole weights, instead of loading parameters by name.

        Returns:
            The checkpoint's path and the caller's `client_state`.

        Raises:
            CheckpointError: nothing to load, damaged, or of another model; on every rank, and the
                engine is as it was.
        """
        options = Options(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        with self._account.charged():
            loaded = self._checkpoints.load(self, Path(load_dir), tag, options)
        if loaded.counters is not None:
            self.global_steps = loaded.counters.global_steps
            self.global_samples = loaded.counters.global_samples
            self.micro_steps = loaded.counters.micro_steps
            self._num_backwards = loaded.counters.num_backwards
            self._boundary.forced = loaded.counters.forced_boundary
            self._update.go_on()
        self._take_place()
        self.world.comm.residents.invalidate()
        with self._account.charged():
            compiling.advance(self._compiled, self.global_steps)
        return loaded.path, loaded.client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors"
    ) -> str:
        """Write the whole weights in 16 bit to one file, from rank 0; all ranks must call.

        Args:
            save_dir: target folder.
            save_filename: `*.safetensors`, or any other suffix for `torch.save`.

        Raises:
            CheckpointError: the file cannot be written; on every rank.
        """
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16
        path = Path(save_dir) / save_filename
        return export.save_weights(self.module, path, dtype, self._checkpoints)

    def destroy(self) -> None:
        """Let go of compiled code and gradients. The model stays sharded and usable.

        Raises:
            CheckpointError: a checkpoint that was saved in the background could not be written.
        """
        try:
            self._checkpoints.close()
        finally:
            self.local.zero_grad()
            if self._compiled is not None:
                self._compiled.session.close()
            self._compiled = None
            self.world.comm.residents.clear()
            forget_compiled_call(self.module)

    def unshard(self) -> nn.Module:
        """Give the model back whole; all ranks must call. The engine is of no use afterwards."""
        self.destroy()
        return unshard(self.module)
