"""Collect what each optimizer step did, in numbers, for recorders and trackers.

    begin      notes when the first forward of a step begins
    forward    counts the tokens of a batch
    backward   these tokens belong to the step
    updating   notes the rates that the optimizer steps with
    ended      makes one `StepEnded` of it

Nothing here communicates: sums over ranks come with the collective of the gradient norm. With nobody listening
a step costs three looks at a clock; the loss and the norm, which the device has to be waited for, are read for
listeners alone.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchloom import events
from torchloom._torch.untraced import leave_alone
from torchloom.loop.clip import take_norm
from torchloom.loop.plan_check import PlanCheck, log_compared, standing_bytes
from torchloom.loop.step_flops import Work
from torchloom.loop.trackers import Tracker
from torchloom.memory import distinct_bytes
from torchloom.pipeline import CompileSession
from torchloom.runtime import Communicator
from torchloom.step import CompiledStep


@dataclass
class StepLog:
    """Collects the numbers of one engine's steps."""

    device: torch.device
    comm: Communicator
    work: Work
    check: PlanCheck
    standing_bytes: Callable[[], int]
    """Returns the bytes on the device that stay between steps."""
    trackers: list[Tracker] = field(default_factory=list)
    tokens: float = 0.0
    """Of the step so far, on this rank; NaN where a batch holds none that can be counted."""
    _pending: float = 0.0
    """Tokens of forward passes that no backward has followed yet."""
    _ended_s: float | None = None
    """When the last step ended."""
    _began_s: float | None = None
    """When the first forward of this step began."""
    _lr: float | None = None
    _scale: float | None = None
    _num_collectives: int = 0
    _num_bytes: int = 0
    _num_graphs: int = 0

    def __post_init__(self) -> None:
        self._num_collectives, self._num_bytes = self.comm.stats()

    def is_heard(self, step: int) -> bool:
        """Say whether anyone wants the numbers of a step."""
        return events.is_heard() or any(each.is_due(step) for each in self.trackers)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a forward call begins; those without gradients, such as evaluations, do not count."""
        if self._began_s is not None or not torch.is_grad_enabled():
            return

        def live_bytes() -> int:
            batch = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            return self.standing_bytes() + distinct_bytes(batch)

        is_heard = events.is_heard() or bool(self.trackers)
        self.check.begin(live_bytes, is_heard=is_heard)
        self._began_s = time.perf_counter()

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a forward call that has succeeded."""
        if torch.is_grad_enabled():
            found = self.work.tokens_of(*args, **kwargs)
            self._pending += math.nan if found is None else found

    def backward(self) -> bool:
        """Note that the forward passes before belong to the step; say whether there were any."""
        pending, self._pending = self._pending, 0.0
        self.tokens += pending
        return pending != 0.0

    def updating(self, optimizer: Optimizer, scale: float | None, step: int) -> None:
        """Note what the optimizer is about to step with; a schedule moves on before the step has ended.

        Args:
            optimizer: the engine's.
            scale: of the loss; None if it is not scaled.
            step: the number of the step.
        """
        if self.is_heard(step):
            groups = optimizer.param_groups
            lr = groups[0].get("lr") if groups else None
            self._lr, self._scale = (None if lr is None else float(lr)), scale

    def ended(
        self,
        session: CompileSession | None,
        *,
        step: int,
        norm: Tensor | None,
        loss_sums: Tensor | None = None,
        losses: Sequence[Tensor] = (),
        samples: int | None = None,
        skipped: bool = False,
        num_skipped: int | None = None,
    ) -> None:
        """Tell recorders and trackers of a step, and begin the next.

        Args:
            session: of the compiled graphs; None if nothing is compiled.
            step: steps done, this one included.
            norm: of the gradients; None if not known.
            loss_sums: losses, ranks and tokens summed over all ranks, see `Gradients.norm_and_sums`.
            losses: this rank's.
            samples: since the run began; None if not known.
            skipped: whether the step was skipped.
            num_skipped: steps skipped since the run began; None if not known.
        """
        now_s = time.perf_counter()
        num_graphs = 0 if session is None else len(session.report.graphs)
        compared = self.check.end(session, step, skipped=skipped)
        if compared is not None:
            log_compared(compared)
            events.emit(compared)
        foretold = self.check.foretold
        num_collectives, num_bytes = self.comm.stats()
        if self.is_heard(step):
            self._tell(
                events.StepEnded(
                    step=step,
                    rank=dist.get_rank(),
                    skipped=skipped,
                    samples=samples,
                    num_skipped=num_skipped,
                    lr=self._lr,
                    loss_scale=self._scale,
                    peak_bytes=max(self.check.peak_before_bytes, peak_bytes(self.device)),
                    graphs=num_graphs,
                    recompiles=num_graphs - self._num_graphs if self._num_graphs else 0,
                    predicted_peak_bytes=None if foretold is None else foretold.peak_bytes,
                    measured_peak_bytes=self.check.measured_peak_bytes,
                    predicted_seconds=None if foretold is None else foretold.seconds,
                    grad_norm=None if norm is None else float(norm),
                    collectives=num_collectives - self._num_collectives,
                    collective_bytes=num_bytes - self._num_bytes,
                    **self._of_batch(loss_sums, losses, now_s),
                )
            )
        self._num_graphs = num_graphs
        self._num_collectives, self._num_bytes = num_collectives, num_bytes
        self.restart(now_s)

    def drop(self) -> None:
        """Forget the batches of the step so far."""
        self.tokens = self._pending = 0.0

    def restart(self, now_s: float | None = None) -> None:
        """Begin a step anew; without a time, the next step is timed from its forward on."""
        self._ended_s, self._began_s = now_s, None
        self.drop()

    def end(self, step: int) -> None:
        """Let trackers write what they hold back, and forget them."""
        for each in self.trackers:
            each.end(step)
        self.trackers.clear()

    def _tell(self, ended: events.StepEnded) -> None:
        events.emit(ended)
        for each in self.trackers:
            if each.is_due(ended.step):
                each.take(ended)

    def _of_batch(
        self, loss_sums: Tensor | None, losses: Sequence[Tensor], now_s: float
    ) -> dict[str, Any]:
        """Return times, losses and tokens."""
        began_s = now_s if self._began_s is None else self._began_s
        since_s = began_s if self._ended_s is None else self._ended_s
        seconds = now_s - since_s
        loss, tokens = _means(loss_sums)
        own = [each.reshape(()).float() for each in losses]
        rank_tokens = _counted(self.tokens)
        per_rank = (
            rank_tokens
            if tokens is None
            else tokens / (self.comm.world_size * self.comm.num_replicas)
        )
        return {
            "seconds": seconds,
            "wait_seconds": None if self._began_s is None else began_s - since_s,
            "loss": loss,
            "rank_loss": float(torch.stack(own).sum()) if own else None,
            "tokens": tokens,
            "rank_tokens": rank_tokens,
            "tokens_per_second": None if tokens is None else tokens / seconds,
            "mfu": self.work.mfu(None if per_rank is None else per_rank / seconds),
        }


# a compiled model may call another model's engine
for _each in (StepLog.begin, StepLog.forward):
    leave_alone(_each, "it looks at a clock and counts tokens")


def _means(loss_sums: Tensor | None) -> tuple[float | None, int | None]:
    """Return the mean loss and the sum of tokens over ranks, from what the norm's collective carried."""
    if loss_sums is None:
        return None, None
    loss, num_ranks, tokens = loss_sums.tolist()
    return (loss / num_ranks if num_ranks else None), _counted(tokens)


def _counted(tokens: float) -> int | None:
    return int(tokens) if math.isfinite(tokens) and tokens > 0 else None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory allocated on a device so far; on a CPU, resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
        optimizer: Optimizer | None,
        comm: Communicator,
        device: torch.device,
        *,
        micro_steps: int,
        trackers: list[Tracker],
    ) -> None:
        # Parameters may lead to the model, which this must not keep alive.
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
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
