"""Count micro-steps, and say which of them end in an optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from torchloom.errors import EngineError
from torchloom.shard import Layout


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
