"""Handle a loss that depends on several engines' models: its backward gives gradients to all of them.

backward      of any engine: those whose gradients it changed remember how its loss was scaled
step          of such an engine: allowed where it scales its own losses alike, also without an own backward
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from torchloom.errors import EngineError
from torchloom.loop.owned_params import LocalParams


class Scaling(NamedTuple):
    """What a loss is divided and multiplied by before backward."""

    accumulation: int
    loss_scale: float


@dataclass(eq=False)
class Share:
    """What one engine has got from the losses of others since its last step."""

    local: LocalParams
    _got: dict[Scaling, list[weakref.ref[Tensor]]] = field(default_factory=dict, init=False)
    """Gradients that backward passes of others made or added to, by how their losses were scaled."""

    def scalings(self) -> list[Scaling]:
        """Return how the losses of others were scaled whose gradients are still here."""
        here = {id(grad) for grad in self.local.present_gradients()}
        return [
            scaling
            for scaling, grads in self._got.items()
            if any(id(grad) in here for ref in grads if (grad := ref()) is not None)
        ]

    def check(self, own: Scaling) -> bool:
        """Say whether gradients of others' losses are here.

        Raises:
            EngineError: such a loss was scaled otherwise than this engine's own.
        """
        found = self.scalings()
        for each in found:
            if each != own:
                raise EngineError(
                    "some of this engine's gradients come from backward() of another engine, whose loss "
                    f"was divided by {each.accumulation} accumulation steps and scaled by "
                    f"{each.loss_scale:g}; here it is {own.accumulation} and {own.loss_scale:g}: give "
                    "engines that share a loss the same gradient_accumulation_steps and precision, or "
                    "drop those gradients by zero_grad() of this engine"
                )
        return bool(found)

    def forget(self) -> None:
        """Begin anew, after a step or when gradients are dropped."""
        self._got.clear()

    def note(self, scaling: Scaling, grads: list[Tensor]) -> None:
        """Remember gradients that another engine's loss has changed."""
        self._got.setdefault(scaling, []).extend(map(weakref.ref, grads))


class SharedLoss:
    """Knows all engines of this process."""

    def __init__(self) -> None:
        self.is_running = False
        """Whether a backward pass of an engine runs; checkpoints run others inside of it."""
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()

    def join(self, local: LocalParams) -> Share:
        """Return what a new engine keeps, as long as it lives."""
        share = Share(local)
        self._shares.add(share)
        return share

    @contextmanager
    def backward(self, own: Share, scaling: Scaling) -> Iterator[None]:
        """Let the other engines know whether the backward pass inside has given them gradients."""
        others = [(each, each.local.versions()) for each in self._shares if each is not own]
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
        for each, before in others:
            changed = each.local.changed_gradients(before)
            if changed:
                each.note(scaling, changed)
