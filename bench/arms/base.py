"""What an arm is given and what it gives back, and the training step that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.launch.groups import ensure_process_group

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
    """Sequences per rank and micro-step."""
    accumulation: int = 1
    """Micro-steps of a step."""

    def micro_batches(self, tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what each micro-step reads of a step's batch."""
        return zip(tokens.split(self.batch), targets.split(self.batch), strict=True)


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


def make_step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    unreduced: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    """Return the plain training step: forward and backward of each micro-step, update, drop gradients.

    `unreduced` opens the context of all micro-steps but the last, for peers that can accumulate
    gradients before they reduce them.
    """

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for micro in job.micro_batches(tokens, targets):
            is_last = len(losses) + 1 == job.accumulation
            with nullcontext() if is_last else unreduced():
                loss = model(*micro)
                (loss / job.accumulation).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return step


def join_group() -> None:
    """Open the process group that the launcher's environment describes, on loopback where it is local."""
    ensure_process_group()
