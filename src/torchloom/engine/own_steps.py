"""Steps of loops without an engine, in numbers: what is known where an optimizer of torch's has stepped.

The loss, tokens and the scale of the loss are the loop's own. The norm is known if the loop has clipped.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from torchloom.engine.own_clipping import take_norm
from torchloom.engine.plan_check import PlanCheck
from torchloom.engine.step_log import StepLog
from torchloom.engine.trackers import Tracker
from torchloom.engine.work import Work
from torchloom.runtime import Communicator
from torchloom.step import CompiledStep


@dataclass
class _Sums:
    """What a loop has computed of a step."""

    norm: Tensor | None
    loss_sums: Tensor | None = None
    stepped_losses: tuple[Tensor, ...] = ()


def on_step(
    compiled: CompiledStep,
    optimizer: Optimizer | None,
    comm: Communicator,
    *,
    rank: int,
    micro_steps: int,
    tracker: Tracker | None,
) -> Callable[[], None]:
    """Return a function to call after each optimizer step of a loop.

    It advances the schedule of passes, and tells recorders and trackers of the step.

    Args:
        compiled: the loop's model; it is not held otherwise.
        optimizer: the loop's, whose learning rate is told; None: not known.
        comm: counts collectives.
        rank: the global one.
        micro_steps: forward and backward passes of an optimizer step.
        tracker: told of each step; None: recorders alone are.
    """
    device = compiled.description.device
    log = StepLog(
        device,
        rank,
        comm.world_size * comm.num_replicas,
        comm,
        Work(flops_per_token=None, peak_tflops=None),
        PlanCheck(device, micro_steps),
        standing_bytes=int,  # nothing is measured: the loop's forward is not seen
    )
    if tracker is not None:
        log.trackers.append(tracker)
    log.restart(time.perf_counter())
    # Parameters may lead to the model, which the function must not keep alive.
    stepped = None if optimizer is None else weakref.ref(optimizer)
    steps = itertools.count(1)

    def ended() -> None:
        step = next(steps)
        known = None if stepped is None else stepped()
        if known is not None:
            log.updating(known, None, step)
        compiled.advance(step)
        norm = take_norm(comm.handle)
        log.ended(
            _Sums(norm), compiled.session, step=step, samples=None, skipped=False, num_skipped=None
        )

    return ended
