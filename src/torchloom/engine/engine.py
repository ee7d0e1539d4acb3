"""The engine: runs the training steps of a sharded model.

    loss = engine(batch)       forward, with inputs cast to the compute dtype
    engine.backward(loss)      scales the loss for fp16 and accumulation; averages gradients
    engine.step()              at the accumulation boundary: clips gradients, steps optimizer and schedule

The methods have DeepSpeed's names and arguments. The engine copies no weights: it shards the caller's
model in place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.module_calls import call_in_place
from torchloom.checkpoints import Counters
from torchloom.engine.batches import Batches
from torchloom.engine.compiling import Compiling
from torchloom.engine.losses import Scaling, check_loss, mark
from torchloom.engine.module_access import ModuleAccess
from torchloom.engine.queries import Queries
from torchloom.engine.saving import Saving
from torchloom.engine.state import (
    SHARED_LOSS,
    check_holds_off,
    check_step,
    reduces_at_boundary,
)
from torchloom.errors import unwrapped
from torchloom.log import get_logger
from torchloom.loop.optimizer_hooks import note_rates
from torchloom.loop.precision import autocasting, cast_inputs, dtype_of
from torchloom.loop.trackers import LogMetrics, tracker_of
from torchloom.position import POSITION
from torchloom.runtime import tell_step
from torchloom.shard import layout_of, unshard

logger = get_logger(__name__)


class Engine(Batches, Compiling, Saving, Queries, ModuleAccess):
    """Drives forward, backward and step of one sharded model; made by `torchloom.initialize`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating-point inputs to the compute dtype and run the model, in `torch_autocast` if configured."""
        dtype = dtype_of(self.config.precision.dtype)
        if dtype is not torch.float32:
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        self._take_place()
        self.local.settle()
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
        shared = SHARED_LOSS.backward(self._share, self._scaling)
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
            self.local.check(self._owners())
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
        self._advance()
        every = self.config.steps_per_print
        if every and every != math.inf and self.global_steps % int(every) == 0:
            rates = ", ".join(f"{lr:.3g}" for lr in self.get_lr())
            times, skipped = self.timers.report(), self.skipped_steps
            logger.info("step %d, skipped %d, lr %s%s", self.global_steps, skipped, rates, times)
        self._step_log.ended(
            None if self._compiled is None else self._compiled.session,
            step=self.global_steps,
            norm=self._update.norm,
            loss_sums=self._update.loss_sums,
            losses=self._update.stepped_losses,
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
        self._advance()

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
            call_in_place(self.module, None)

    def unshard(self) -> nn.Module:
        """Return the model with whole weights; all ranks must call. The engine cannot be used afterwards."""
        self.destroy()
        return unshard(self.module)
