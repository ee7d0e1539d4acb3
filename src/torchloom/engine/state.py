"""What an engine holds: the sharded model, its optimizer, and what drives, times and counts its steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from torchloom import events
from torchloom._torch.modes import is_profiling
from torchloom.checkpoints import Checkpoints
from torchloom.config import Config
from torchloom.engine.losses import SharedLoss, follow_user_backward
from torchloom.engine.update import LossScaler, Update
from torchloom.errors import EngineError
from torchloom.exchange import Agreement
from torchloom.launch.groups import World
from torchloom.loop.offloads import Offloads
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.plan_check import PlanCheck, standing_bytes
from torchloom.loop.step_log import StepLog, Work, work_of
from torchloom.loop.trackers import trackers_of
from torchloom.pipeline import REGISTRY, PassRegistry
from torchloom.position import POSITION
from torchloom.runtime import Account
from torchloom.shard import Layout, Owners, layout_of
from torchloom.step import CompiledStep


@dataclass
class Boundary:
    """Counts micro-steps, unless the caller says where the boundary is."""

    accumulation_steps: int
    is_managed: bool = True
    """Whether micro-steps are counted; otherwise each step is a boundary."""
    forced: bool | None = None
    """What the caller said of the next micro-step."""
    is_held_off: bool = False
    """Whether a block of `no_sync` or `coalesce_grad_reduction` is open. Checkpoints do not keep this."""

    def is_next(self, micro_steps: int) -> bool:
        """Say whether the micro-step after `micro_steps` others updates the weights."""
        if not self.is_managed:
            return True
        if self.forced is not None:
            return self.forced
        return (micro_steps + 1) % self.accumulation_steps == 0

    def force(self, is_boundary: bool) -> None:
        """Set whether the next micro-step updates the weights; see `Engine.set_gradient_accumulation_boundary`."""
        if not self.is_managed:
            raise EngineError(
                "set_gradient_accumulation_boundary() was called with managed_gradient_accumulation: false, by "
                "which each step() updates the weights: call step() at the boundary alone, or remove that key"
            )
        self.forced = is_boundary

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Let no step end inside a `with` block; see `Engine.no_sync`."""
        before, self.is_held_off = self.is_held_off, True
        try:
            yield
        finally:
            self.is_held_off = before


def check_holds_off(layout: Layout) -> None:
    """Raise unless gradients stay local until a step.

    Raises:
        EngineError: gradients are sharded (stages 2, 3) or averaged inside compiled graphs.
    """
    if not reduces_at_boundary(layout):
        raise EngineError(
            "no_sync() needs whole local gradients: stages 2 and 3 shard them, and a compiled "
            "stage 0 or 1 without accumulation averages them in its graph. Set "
            "gradient_accumulation_steps in the config instead"
        )


def reduces_at_boundary(layout: Layout) -> bool:
    """Say whether gradients stay local until the boundary."""
    return layout.stage < 2 and all(spec.mode != "synced" for spec in layout)


def check_step(boundary: Boundary, num_backwards: int, optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer if `Engine.step` may run now.

    Raises:
        EngineError: a block of `no_sync` is open, there was no backward pass since the last step, or there is
            no optimizer.
    """
    if boundary.is_held_off:
        raise EngineError(
            "step() was called inside no_sync() or coalesce_grad_reduction(): leave the block first, then call "
            "step()"
        )
    if num_backwards == 0:
        raise EngineError(
            "step() was called without backward(): call engine.backward(loss), or backward() of a loss "
            "made of the engine's outputs, then engine.step(), once per micro-batch"
        )
    if optimizer is None:
        raise EngineError(
            "step() needs an optimizer: pass optimizer= to torchloom.initialize, or name one in "
            "the config"
        )
    return optimizer


@dataclass
class Timers:
    """Adds up named stretches of time, and tells them to an open recorder. Off, it costs four checks.

    Under torch's profiler each stretch is an event of its trace: `torchloom.` and its name. On CUDA each stretch ends by waiting for the device, or it would measure only its launch.
    """

    enabled: bool
    device: torch.device
    check: PlanCheck
    """Measures some steps."""
    step: int = 0
    """The optimizer step that the stretches belong to."""
    _durations_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a `with` block to `name`."""
        is_heard, is_profiled = events.is_heard(), is_profiling()
        meter = self.check.meter
        if not self.enabled and not is_heard and not is_profiled and meter is None:
            yield
            return
        started_at, started = time.time(), time.perf_counter()
        with (
            record_function(f"torchloom.{name}") if is_profiled else nullcontext(),
            nullcontext() if meter is None else meter.phase(name),
        ):
            yield
        if self.enabled and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        duration = time.perf_counter() - started
        if self.enabled:
            self._durations_s[name].append(duration)
        if is_heard:
            events.emit(
                events.PhaseRan(phase=name, step=self.step, start_s=started_at, duration_s=duration)
            )

    def report(self) -> str:
        """Return the mean of each stretch since the last report, in milliseconds, and start anew."""
        parts = [
            f", {name} {1e3 * statistics.mean(found):.1f} ms"
            for name, found in self._durations_s.items()
        ]
        self._durations_s.clear()
        return "".join(parts)


_SERIALS = itertools.count(1)
SHARED_LOSS = SharedLoss()
"""Between the engines of this process."""


class EngineState:
    """The attributes of an `Engine`, which its parts share."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        world: World,
        local: OwnedParams,
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
        self._owners = Owners(model)
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
        self._share = SHARED_LOSS.join(local)
        follow_user_backward(SHARED_LOSS)
        self._step_applied = False
        check = PlanCheck(world.device, batch.accumulation_steps)
        self.timers = Timers(config.wall_clock_breakdown, world.device, check)
        self.work: Work = work_of(model, layout_of(model), world.device)
        self._step_log = StepLog(
            world.device,
            world.comm,
            self.work,
            check,
            functools.partial(standing_bytes, model, optimizer, world.comm),
        )
        if world.rank == 0:
            self._step_log.trackers += trackers_of(config.monitors)

    def _take_place(self) -> None:
        """Record this engine and its step as the position that all ranks compare at their next collective."""
        POSITION.actor, POSITION.step = self._serial, self.global_steps
