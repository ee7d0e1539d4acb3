"""Steps of loops without an engine, in numbers: what is known where an optimizer of torch's has stepped.

The loss, tokens and the scale of the loss are the loop's own. The norm is known if the loop has clipped. The
peak of memory is measured from a step's first forward on, until the optimizer has stepped.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchloom.loop.clip import take_norm
from torchloom.loop.plan_check import PlanCheck, standing_bytes
from torchloom.loop.step_flops import Work
from torchloom.loop.step_log import StepLog
from torchloom.loop.trackers import Tracker
from torchloom.runtime import Communicator
from torchloom.step import CompiledStep


@dataclass
class _Sums:
    """What a loop has computed of a step."""

    norm: Tensor | None
    loss_sums: Tensor | None = None
    stepped_losses: tuple[Tensor, ...] = ()


class OwnSteps:
    """The steps of one loop: told before each forward and after each step of the optimizer.

    It advances the schedule of passes, and tells recorders and trackers of each step.

    Args:
        model: the loop's; it is not held.
        optimizer: the loop's, whose learning rate is told; None: not known. It is not held.
        comm: counts collectives.
        device: of the model.
        rank: the global one.
        micro_steps: forward and backward passes of an optimizer step.
        tracker: told of each step; None: recorders alone are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        comm: Communicator,
        device: torch.device,
        *,
        rank: int,
        micro_steps: int,
        tracker: Tracker | None,
    ) -> None:
        # Parameters may lead to the model, which this must not keep alive.
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._comm = comm
        self._log = StepLog(
            device,
            rank,
            comm.world_size * comm.num_replicas,
            comm,
            Work(flops_per_token=None, peak_tflops=None),
            PlanCheck(device, micro_steps, times=False),
            standing_bytes=self._standing_bytes,
        )
        if tracker is not None:
            self._log.trackers.append(tracker)
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
        self._log.ended(
            _Sums(take_norm(self._comm.handle)),
            compiled.session,
            step=self._step,
            samples=None,
            skipped=False,
            num_skipped=None,
        )

    def _standing_bytes(self) -> int:
        model = self._model()
        optimizer = None if self._optimizer is None else self._optimizer()
        return 0 if model is None else standing_bytes(model, optimizer, self._comm)


def _storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()
