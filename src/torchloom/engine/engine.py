"""The engine: runs the training steps of a sharded model.

    loss = engine(batch)       forward, with inputs cast to the compute dtype
    engine.backward(loss)      scales the loss for fp16 and accumulation; averages gradients
    engine.step()              at the accumulation boundary: clips gradients, steps optimizer and schedule

The methods have DeepSpeed's names and arguments. The engine copies no weights: it shards the caller's
model in place.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.module_calls import forget_compiled_call
from torchloom.compiler.support import check_supported
from torchloom.config import Config
from torchloom.engine import compiling
from torchloom.engine.batches import Batches
from torchloom.engine.boundary import (
    Boundary,
    check_holds_off,
    check_step,
    print_progress,
    reduces_at_boundary,
)
from torchloom.engine.checkpoints import Checkpoints, Counters
from torchloom.engine.groups import World
from torchloom.engine.loss import check_loss
from torchloom.engine.module_access import ModuleAccess
from torchloom.engine.monitors import trackers_of
from torchloom.engine.offloads import Offloads
from torchloom.engine.plan_check import PlanCheck, standing_bytes
from torchloom.engine.precision import autocasting, cast_inputs, dtype_of
from torchloom.engine.queries import Queries
from torchloom.engine.rates import note_rates
from torchloom.engine.saving import Saving
from torchloom.engine.scaling import LossScaler
from torchloom.engine.shared_loss import Scaling, SharedLoss
from torchloom.engine.step_flops import Work, work_of
from torchloom.engine.step_log import StepLog
from torchloom.engine.stepped_tensors import LocalParams
from torchloom.engine.timers import Timers
from torchloom.engine.trackers import LogMetrics, tracker_of
from torchloom.engine.update import Update
from torchloom.engine.user_backward import follow_user_backward, mark
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


class Engine(Batches, Saving, Queries, ModuleAccess):
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
        batch = config.batch
        self._boundary = Boundary(batch.accumulation_steps, batch.is_managed)
        self._num_backwards = 0
        self._share = _SHARED_LOSS.join(local)
        follow_user_backward(_SHARED_LOSS)
        self._step_applied = False
        check = PlanCheck(world.device, batch.accumulation_steps)
        self.timers = Timers(config.wall_clock_breakdown, world.device, check)
        self.work: Work = work_of(model, layout_of(model), world.device)
        self._step_log = StepLog(
            world.device,
            world.rank,
            world.world_size,
            world.comm,
            self.work,
            check,
            functools.partial(standing_bytes, model, optimizer, world.comm),
        )
        if world.rank == 0:
            self._step_log.trackers += trackers_of(config.monitors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point inputs to the compute dtype and run the model, in `torch_autocast` if configured."""
        dtype = dtype_of(self.config.precision.dtype)
        if dtype is not torch.float32:
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        self._take_place()
        self._update.settle()
        self._step_log.begin(args, kwargs)
        autocast = autocasting(self.config.precision, self.device)
        with self.timers.measure("forward"), unwrapped(), autocast, self._account.charged():
            results = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            mark(results, self)
        self._step_log.forward(args, kwargs)
        return results

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of a scalar loss and add them to those of earlier micro-steps.

        Args:
            loss: a tensor with one element, made by this engine's model.
            retain_graph: keep the autograd graph for another backward.
            scale_wrt_gas: divide by the accumulation steps, so that accumulated gradients are a
                mean over micro-steps.

        Returns:
            The given loss, divided by the accumulation steps if `scale_wrt_gas`; never by the loss scale.

        Raises:
            EngineError: the loss is not a scalar, or does not depend on the model's parameters.
        """
        check_loss(loss)
        num_micro_steps = self.gradient_accumulation_steps()
        if scale_wrt_gas and num_micro_steps > 1:
            loss = loss / num_micro_steps
        scaled = loss * self.scaler.scale if self.scaler.scale != 1.0 else loss
        with self.in_backward(loss.detach()):
            scaled.backward(retain_graph=retain_graph)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss multiplied by the loss scale of fp16, for a `backward()` of the caller's.

        In other precisions it returns the loss itself, and `loss.backward()` needs no such call.

        Args:
            loss: a tensor with one element, made of this engine's outputs.

        Raises:
            EngineError: the loss is not a scalar, is scaled already, or does not depend on the model's
                parameters.

        Example:
            >>> engine.scale(engine(batch)).backward()  # doctest: +SKIP
        """
        check_loss(loss)
        if self.scaler.scale == 1.0:
            return loss
        loss = loss * self.scaler.scale
        mark(loss, self, self.scaler.scale)
        return loss

    @contextmanager
    def in_backward(self, loss: Tensor | None) -> Iterator[None]:
        """Run a backward pass in a `with` block and count it; the engine enters it for each of its losses.

        Args:
            loss: its value, for logs; None if it is not one number.
        """
        self._take_place()
        shared = _SHARED_LOSS.backward(self._share, self._scaling)
        with self.timers.measure("backward"), unwrapped(), shared, self._account.charged():
            yield
        self._num_backwards += 1
        POSITION.backwards += 1
        if loss is not None:
            self._update.losses.append(loss)
        if self._step_log.backward():  # a second part of the same batch adds none
            self.global_samples += self.config.batch.micro_batch_size * self.world.world_size

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Finish a micro-step; at the accumulation boundary, update the weights.

        At the boundary the engine clips gradients to `gradient_clipping`, steps the optimizer and the
        schedule, and drops the gradients. If a gradient is not finite on any rank, no rank changes
        its weights or optimizer; `non_finite` in the config says what happens then:

            skip     the engine counts the step (`skipped_steps`), logs rank and parameter, and goes on
            raise    the engine raises NonFiniteError at once
            stop     as skip, and `should_stop` is true from then on

        Args:
            lr_kwargs: arguments of the schedule's step, such as `{"metrics": loss}`.

        Raises:
            EngineError: no backward pass since the last step, inside `no_sync()`, or there is no optimizer.
            NonFiniteError: by `raise`; more than `max_consecutive_skips` steps in a row were skipped;
                or the loop went on although `should_stop` was true.
        """
        if self._share.check(self._scaling) and not self._num_backwards:
            self._num_backwards = 1
        optimizer = check_step(self._boundary, self._num_backwards, self.optimizer)
        self._take_place()
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:  # before anything counts: the caller may mend it and call again
            self.local.check(owners_of(self.module))
        self.micro_steps += 1 if self._boundary.is_managed else self._boundary.accumulation_steps
        self._step_applied = False
        self._num_backwards = 0
        if is_boundary:
            self._finish_step(optimizer, lr_kwargs or {})
        self._share.forget()

    def _finish_step(self, optimizer: Optimizer, lr_kwargs: Mapping[str, Any]) -> None:
        """Update the weights, count the step, and tell it to all that follow steps."""
        note_rates(optimizer)
        scale = self.scaler.scale if self.config.precision.scales_loss else None
        self._step_log.updating(optimizer, scale, self.global_steps + 1)
        with self.timers.measure("step"), self._account.charged():
            self._step_applied = self._update.apply(
                optimizer,
                self.lr_scheduler,
                lr_kwargs,
                reduce=reduces_at_boundary(layout_of(self.module)),
                step=self.global_steps,
                tokens=self._step_log.tokens,
            )
        self.global_steps += 1
        self.timers.step = self.global_steps
        self._take_place()
        tell_step(self.global_steps)
        with self._account.charged():
            compiling.advance(self._compiled, self.global_steps)
        print_progress(self)
        self._step_log.ended(
            self._update,
            None if self._compiled is None else self._compiled.session,
            step=self.global_steps,
            samples=self.global_samples,
            skipped=not self._step_applied,
            num_skipped=self.skipped_steps,
        )
        self._checkpoints.after_step(self.global_steps)

    def log_to(
        self, log: LogMetrics, *, every: int = 1, all_ranks: bool = False, prefix: str = ""
    ) -> None:
        """Call a function with the numbers of each optimizer step: a tracker's, or your own.

        `wandb.log` and `mlflow.log_metrics` can be passed as they are. The metrics are floats under the names
        of the fields of `torchloom.events.StepEnded`, such as `loss`, `grad_norm`, `lr`, `tokens_per_second`
        and `peak_bytes`; one that is not known is left out. All ranks may call this method, or rank 0 alone.

        A function that raises costs one warning, and is called again after the next step. It must not
        communicate with other ranks unless they call it, too.

        Args:
            log: called as `log(metrics, step)`; steps count from 1.
            every: optimizer steps from one call to the next. Reading the numbers waits for the device.
            all_ranks: call it on each rank that passes it, instead of on rank 0 alone.
            prefix: put in front of each name, such as "train/".

        Raises:
            ConfigError: `log` cannot be called, or `every` is not a positive whole number.

        Example:
            >>> engine.log_to(wandb.log)  # doctest: +SKIP
            >>> engine.log_to(lambda metrics, step: print(step, metrics["loss"]))  # doctest: +SKIP
        """
        tracker = tracker_of(log, every, prefix)
        if all_ranks or self.rank == 0:
            self._step_log.trackers.append(tracker)

    @property
    def _scaling(self) -> Scaling:
        """By what this engine divides (accumulation) and multiplies (loss scale) its losses."""
        return Scaling(self.gradient_accumulation_steps(), self.scaler.scale)

    def _take_place(self) -> None:
        """Record this engine and its step as the position that all ranks compare at their next collective."""
        POSITION.actor, POSITION.step = self._serial, self.global_steps

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a `with` block whose backward passes add up gradients locally, without averaging over ranks.

        Leave it before the last `backward` of a step: `step` inside of it raises EngineError.

        Raises:
            EngineError: gradients are sharded (stages 2, 3) or averaged inside compiled graphs.
        """
        check_holds_off(layout_of(self.module))
        return self._boundary.held_off()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a `with` block for several backward passes of one step; `step` inside of it raises EngineError.

        Stages 0 and 1 communicate once for all of them, in `step`; stages 2 and 3 shard the gradients of each.
        """
        return self._boundary.held_off()

    def zero_grad(self) -> None:
        """Drop all accumulated gradients."""
        self.local.zero_grad()
        self._update.losses.clear()
        self._step_log.drop()
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
        """Compile the model in place; passes weave sharding and communication into its graphs.

        Args:
            backend: "inductor" (default), "aot_eager", "eager", any registered backend, a path
                "package.module.function", or a callable `(gm, example_inputs) -> callable`.
            compile_kwargs: more arguments for `torch.compile`, e.g. `{"dynamic": True}`.
            schedule: `[(step, [pass, ...]), ...]`: the passes to run from each optimizer step on. A pass is a
                name, a function, a `GraphPass`, or a pair of one of them and a memory budget.
            compiled_autograd_enabled: accepted for DeepSpeed compatibility; no effect, as backward graphs
                are compiled anyway.
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
        """Whether the config enables `compile.deepcompile`."""
        return self.config.compile.deepcompile

    def is_deepcompile_active(self) -> bool:
        """Whether `compile()` has been called, so that passes weave the model's graphs."""
        return self.is_compiled

    def compile_report(self) -> CompileReport:
        """Return a record of each graph so far: woven, taken from a cache, or left to run eagerly."""
        return CompileReport() if self._compiled is None else self._compiled.session.report

    def plan(self) -> Plan:
        """Return the memory plan of the graphs compiled so far; see `compile.memory_budget`."""
        return compiling.plan_of(self._compiled, self.world)

    def get_compile_time(self) -> list[tuple[str, int, int, float]]:
        """Return `("fwd" or "bwd", place, graph id, compile seconds)` of each compiled graph."""
        return self.compile_report().compile_time

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped because a gradient was not finite."""
        return self.scaler.num_skipped

    @property
    def should_stop(self) -> bool:
        """Whether `non_finite: stop` has skipped a step, so that the run should end; equal on all ranks."""
        return self._update.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """The skipped step and the gradient that was not finite, as text; None unless `should_stop`."""
        return self._update.stop_reason

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._boundary.is_next(self.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next `step()` updates the weights, instead of counting micro-steps.

        Raises:
            EngineError: `managed_gradient_accumulation` is false, so that each `step()` updates them.
        """
        self._boundary.force(is_boundary)

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, before clipping; None if it was not computed.

        The engine computes it in each step that it does not skip, unless clipping is off and
        `bf16.check_grad_overflow` is false.
        """
        norm = self._update.norm
        return None if norm is None else float(norm)

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of a whole weight before a step, averaged over ranks; all ranks must call.

        With fp16 it is multiplied by `loss_scale`. Gradients that backward passes made since the last step are in
        it; without any it is zero.

        Args:
            param: one of `parameters()`.

        Returns:
            A copy; None for a parameter that is not trained.

        Example:
            >>> for name, param in engine.named_parameters():  # doctest: +SKIP
            ...     print(name, engine.full_gradient(param).norm())
        """
        self._take_place()
        is_averaged = not reduces_at_boundary(layout_of(self.module))
        return self.local.whole_gradient(param, is_averaged=is_averaged)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights."""
        return self._step_applied

    def comm_stats(self) -> CommStats:
        """Return how many collectives this rank has started, and the bytes of their full tensors."""
        return self.world.comm.stats().since(self._comm_before)

    def move_stats(self) -> MoveStats:
        """Return the bytes that this engine moved between device and host, and its host memory in bytes."""
        return mover_of(self.world.device).stats(self._account)

    def _counters(self) -> Counters:
        return Counters(
            self.global_steps,
            self.global_samples,
            self.micro_steps,
            self._num_backwards,
            self._boundary.forced,
        )

    def _after_load(self, counters: Counters | None) -> None:
        """Go on from where a checkpoint was written; None: its weights alone were taken."""
        if counters is not None:
            self.global_steps = counters.global_steps
            self.global_samples = counters.global_samples
            self.micro_steps = counters.micro_steps
            self._num_backwards = counters.num_backwards
            self._boundary.forced = counters.forced_boundary
            self._update.go_on()
        self._step_log.restart()
        self._take_place()
        self.world.comm.residents.invalidate()
        with self._account.charged():
            compiling.advance(self._compiled, self.global_steps)

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move optimizer states and shards to host memory, to make room, e.g. for generation.

        Training may go on: steps fetch what they need. `reload_states` moves all back.

        Args:
            include: DeepSpeed's names of states; "optim_states" are the optimizer's, all others shards of
                weights. Default: both.
            device: "cpu".
            pin_memory: accepted for DeepSpeed compatibility; memory is pinned where there is a GPU.
            non_blocking: accepted for DeepSpeed compatibility; no effect.

        Raises:
            ConfigError: another device, or shards that cannot leave memory that ranks share.
            EngineError: the optimizer does more than step each parameter on its own.

        Example:
            >>> engine.offload_states()  # doctest: +SKIP
        """
        with self._account.charged():
            self.offloads.away(include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back to the device what `offload_states` has moved to the host.

        Args:
            non_blocking: accepted for DeepSpeed compatibility; no effect.
        """
        with self._account.charged():
            self.offloads.back()

    def empty_partition_cache(self) -> None:
        """Release weights that were kept gathered from one forward pass to the next."""
        self.world.comm.residents.clear()

    def destroy(self) -> None:
        """Release compiled code and gradients. The model stays sharded and usable.

        Raises:
            CheckpointError: a save in the background failed.
        """
        try:
            self._checkpoints.close()
        finally:
            self._step_log.end(self.global_steps)
            self.local.zero_grad()
            if self._compiled is not None:
                self._compiled.session.close()
            self._compiled = None
            self.world.comm.residents.clear()
            forget_compiled_call(self.module)

    def unshard(self) -> nn.Module:
        """Return the model with whole weights; all ranks must call. The engine cannot be used afterwards."""
        self.destroy()
        return unshard(self.module)
