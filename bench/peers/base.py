"""What an arm is given and what it gives back, and the training step that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1

Step = Callable[[Tensor, Tensor], Tensor]


class UnavailableError(Exception):
    """This arm cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a rank is asked to train."""

    model: Callable[[], nn.Module]
    """Builds the model, with the same weights on every rank; called with tokens and targets."""
    rank: int
    world_size: int
    batch: int
    """Sequences per rank and step."""


def _nothing() -> None:
    pass


def _no_facts() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """A model that is ready to train."""

    step: Step
    """One optimizer step; returns this rank's loss from before the update."""
    compile: Callable[[], None] = _nothing
    """Called once before the first step, and timed with it."""
    facts: Callable[[], Mapping[str, Any]] = _no_facts
    """What the arm says of itself after its warm-up, for JSON: a plan, for instance."""
    micro_s: Callable[[], float | None] = _nothing
    """Seconds that forward and backward of the last step took, None where nobody looked."""


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every arm. Fused: `foreach` is several times slower on a CPU."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the plain training step: forward, backward, update, drop the gradients."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def join_group() -> None:
    """Open the gloo process group that the launcher's environment describes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
