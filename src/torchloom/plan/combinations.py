"""List the ways in which a plan can use memory: forms, weights and shards that stay, transfers in flight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchloom.costs import link_us
from torchloom.plan.form import GraphForm
from torchloom.plan.problem import KeptOnDevice, PlanLimits, PlanningProblem
from torchloom.plan.transfer_sizes import CONFIGURED, TransferSizes

_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the bytes of all weights: how many stay gathered in a combination. Of all shards: how many on
the device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Combination:
    """All that a candidate decides but what is recomputed, with the memory that this leaves."""

    form: GraphForm
    kept: KeptOnDevice
    transfers: TransferSizes = CONFIGURED
    gather_share: float = 0.0
    """Of the time of all gathers, the part whose weights stay."""
    copy_share: float = 0.0
    """Of the time of all copies of shards, the part that is saved."""
    code_bytes: int = 0
    """What its code is expected to need beyond its graphs."""
    allowed_bytes: int | None = None
    """What its peak may be; None for no bound."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for equal combinations of a search."""
        return *self.gathers, self.copy_share

    @property
    def gathers(self) -> tuple[Hashable, ...]:
        """What it decides about the form and its gathers."""
        return id(self.form), self.transfers, self.gather_share

    @property
    def num_uses(self) -> int:
        """How many things it decides otherwise than the graph as it is, with nothing kept."""
        is_offloaded = bool(self.form.offload.values)
        is_kept = (self.gather_share > 0) + (self.copy_share > 0)
        return is_offloaded + (self.transfers != CONFIGURED) + is_kept

    @property
    def is_alone(self) -> bool:
        """Whether it makes one use of memory beside recomputation, and of that all."""
        is_whole = self.gather_share in (0, 1) and self.copy_share in (0, 1)
        return self.num_uses == 1 and is_whole


def combination(
    form: GraphForm, limits: PlanLimits, kept: KeptOnDevice | None = None, **shares: Any
) -> Combination:
    """Return a combination with the memory that its limits leave it.

    Args:
        form: of the graph.
        limits: what a plan of the graph may take.
        kept: what stays on the device; by default just what other graphs keep there.
        shares: other fields of the combination.
    """
    code_bytes, budget = limits.overhead.bytes_of(form.offload.names), limits.budget_bytes
    kept = limits.kept_before if kept is None else kept
    return Combination(
        form=form,
        kept=kept,
        code_bytes=code_bytes,
        allowed_bytes=None if budget is None else budget - code_bytes - kept.num_bytes,
        **shares,
    )


def combinations(
    forms: Sequence[GraphForm],
    limits: PlanLimits,
    *,
    may_be_lean: bool,
) -> Iterator[Combination]:
    """Yield all combinations of forms, transfers in flight, and weights and shards that stay.

    Args:
        forms: of one graph.
        limits: what a plan of the graph may take.
        may_be_lean: whether transfers may be slower for the sake of memory.
    """
    problem, before, costs = forms[0].problem, limits.kept_before, forms[0].costs
    weights = _without(problem.weight_bytes, before.weight_bytes)
    shards = _without(problem.shard_bytes, before.shard_bytes)
    # Only parts of the sum count, and those depend little on the number of ranks.
    gather_us = {
        name: costs.network.collective_us("all_gather", size, 2) for name, size in weights.items()
    }
    copy_us = {name: link_us("h2d", size, costs) for name, size in shards.items()}
    # A small gather costs more time for its bytes than a big one: latency.
    order = sorted(weights, key=lambda name: (weights[name], name))
    for stay in _prefixes(order, weights):
        # Of a weight that stays the shard is copied once in a step: those come last.
        once = sorted(shards, key=lambda name: (name in stay, shards[name], name))
        transfers = _transfers(problem, is_gathering=len(stay) < len(order))
        for on_device in _prefixes(once, shards):
            kept = before.joined(KeptOnDevice(stay, on_device))
            if limits.kept_bytes is not None and kept.num_bytes > limits.kept_bytes:
                continue
            saved_us = [
                us / limits.micro_steps if n in stay else us
                for n, us in copy_us.items()
                if n in on_device
            ]
            gather_share = _part((gather_us[name] for name in stay), gather_us.values())
            copy_share = _part(saved_us, copy_us.values())
            for form, each in itertools.product(forms, transfers):
                if may_be_lean or not each.is_lean:
                    shares = {"gather_share": gather_share, "copy_share": copy_share}
                    yield combination(form, limits, kept, transfers=each, **shares)


def _transfers(problem: PlanningProblem, *, is_gathering: bool) -> list[TransferSizes]:
    """Return the sizes to try; where nothing is left to gather, those that change reductions."""
    every = [CONFIGURED, *problem.transfers]
    if is_gathering:
        return every
    reduces = any(problem.traffic.reductions.values())
    return [each for each in every if each == CONFIGURED or (each.is_lean and reduces)]


def _without(sizes: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name not in known}


def _prefixes(order: Sequence[str], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the first names of an order, with their bytes, up to several shares of all bytes."""
    ends = list(itertools.accumulate(sizes[name] for name in order))
    counts = {
        sum(end <= share * ends[-1] * (1 + 1e-9) for end in ends) if ends else 0
        for share in _SHARES
    }
    return [{name: sizes[name] for name in order[:count]} for count in sorted(counts)]


def _part(some: Iterable[float], whole: Iterable[float]) -> float:
    """Return a share that is 1 for all, in whatever order they come."""
    total = math.fsum(whole)
    return math.fsum(some) / total if total else 0.0
