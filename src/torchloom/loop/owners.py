"""Choose which rank owns a parameter: as much to do, and to keep, on each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchloom.events import OwnersChosen
from torchloom.loop.elementwise import is_known
from torchloom.loop.optimizer_list import OptimizerList
from torchloom.shard import Layout, ParamSpec, divided_by_id
from torchloom.shard.shards import valid_numel


class Unit(NamedTuple):
    """A parameter that one rank steps."""

    param: nn.Parameter
    spec: ParamSpec
    layout: Layout
    owner: int
    """Its rank among those that share one copy of the weights."""

    @property
    def is_mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.layout.rank

    def numel_of(self, rank: int) -> int:
        """Return how many elements a rank's shard holds, without padding."""
        return valid_numel(self.spec.numel, rank, self.spec.shard_numel)

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return what of a flat whole tensor is in a rank's shard."""
        start = rank * self.spec.shard_numel
        return flat[start : start + self.numel_of(rank)]


class Load(NamedTuple):
    """What a rank has to do for its parameters: compared by cost, then by memory."""

    cost: float
    numel: float

    @staticmethod
    def of(shape: Sequence[int]) -> Load:
        """Return the load of a parameter: the products of a step of Newton-Schulz, as good a guess for other optimizers.

        With s the smaller and l the larger side it is 4 s^2 l + 2 s^3 (Jordan et al., "Muon", 2024); of what is no matrix,
        its elements.
        """
        numel = math.prod(shape)
        if len(shape) < 2 or not numel:
            return Load(numel, numel)
        small, large = sorted((shape[0], numel // shape[0]))
        return Load(4 * small**2 * large + 2 * small**3, numel)


def add_to_least(loads: list[Load], load: Load) -> int:
    """Add a load to that of the rank with the least, and return this rank.

    Loads that come in descending order end up within a third of the best division, and closer where they are many:
    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    owner = loads.index(min(loads))
    loads[owner] = Load(loads[owner].cost + load.cost, loads[owner].numel + load.numel)
    return owner


def owners_chosen(optimizer: Any, units: Mapping[int, Unit]) -> tuple[OwnersChosen, ...]:
    """Return which parameters an optimizer, or each of several that step together, sees whole, on which rank, and why.

    Args:
        optimizer: over parameters of sharded models.
        units: what it sees whole, by the id of the parameter.
    """
    members = optimizer.linked() if isinstance(optimizer, OptimizerList) else [optimizer]
    return tuple(_chosen(each, units) for each in members)


def _chosen(optimizer: Any, units: Mapping[int, Unit]) -> OwnersChosen:
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    owned = [units[each] for each in params if each in units]
    known = divided_by_id()
    if owned:
        reason = (
            "it computes with whole parameters"
            if is_known(optimizer)
            else "its class is not known to be elementwise"
        )
    else:
        reason = (
            "its class is known to be elementwise"
            if is_known(optimizer)
            else "it is declared elementwise"
        )
    return OwnersChosen(
        optimizer=type(optimizer).__name__,
        reason=reason,
        parameters=tuple((unit.spec.name, tuple(unit.spec.shape), unit.owner) for unit in owned),
        num_divided=sum(each in known for each in params) - len(owned),
        step_bytes=sum(
            3 * (unit.spec.numel - unit.numel_of(unit.owner)) * unit.spec.dtype.itemsize
            for unit in owned
        ),
    )
