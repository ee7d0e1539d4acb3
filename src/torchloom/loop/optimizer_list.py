"""Several optimizers of one model as one: Muon for matrices and AdamW for the rest, say.

OptimizerList   steps them: of an engine
StepsInTurn     reads them: of a loop that steps each itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchloom.errors import EngineError
from torchloom.loop.elementwise import is_elementwise


class OptimizerList(Optimizer):
    """Steps several optimizers; their groups, in order, are its own, and they share one `state`.

    Schedules, checkpoints and loops so see one optimizer. Groups whose optimizer is elementwise are declared so.

    Args:
        optimizers: fresh, over different parameters. Step none of them by itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._sizes = [len(each.param_groups) for each in self.optimizers]
        groups = []
        for each in self.optimizers:
            for group in each.param_groups:
                if is_elementwise(each, group):
                    group["elementwise"] = True
                groups.append(group)
        self._is_made = False
        super().__init__(groups, {})
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group of a finished optimizer: which of the optimizers steps it is not said.

        Raises:
            EngineError: it is finished.
        """
        if self._is_made:
            raise EngineError(
                "a group cannot be added to several optimizers that step together: give each its groups before "
                "torchloom.initialize"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer over its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.linked():
            each.step()
        return loss

    def linked(self) -> list[Optimizer]:
        """Return the optimizers, with their groups and the common states: a load replaces both."""
        groups = iter(self.param_groups)
        for each, size in zip(self.optimizers, self._sizes, strict=True):
            each.param_groups = [next(groups) for _ in range(size)]
            each.state = self.state
        return self.optimizers


class StepsInTurn:
    """Several optimizers that a loop steps one after the other, read as one.

    Args:
        optimizers: in the order in which the loop steps them.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups that they have now, in order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states that they have now."""
        return {key: value for each in self.optimizers for key, value in each.state.items()}


def members_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that are stepped each by itself, without what frameworks wrap around them."""
    found = optimizer.optimizers if isinstance(optimizer, StepsInTurn) else [optimizer]
    return [getattr(each, "optimizer", each) for each in found if each is not None]
