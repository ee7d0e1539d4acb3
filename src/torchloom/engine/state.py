"""What an engine holds: the sharded model, its optimizer, and what drives and counts its steps."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchloom.checkpoints import Checkpoints
from torchloom.config import Config
from torchloom.engine.boundary import Boundary
from torchloom.engine.losses import SharedLoss, follow_user_backward
from torchloom.engine.monitors import trackers_of
from torchloom.engine.scaling import LossScaler
from torchloom.engine.timers import Timers
from torchloom.engine.update import Update
from torchloom.exchange import Agreement
from torchloom.launch.groups import World
from torchloom.loop.offloads import Offloads
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.plan_check import PlanCheck, standing_bytes
from torchloom.loop.step_flops import Work, work_of
from torchloom.loop.step_log import StepLog
from torchloom.pipeline import REGISTRY, PassRegistry
from torchloom.position import POSITION
from torchloom.runtime import Account
from torchloom.shard import Owners, layout_of
from torchloom.step import CompiledStep

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
