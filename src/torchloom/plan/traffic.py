"""What a joint graph sends, whatever a plan decides, and what that costs at least: a part of the bound.

A collective takes `load` of its time from compute where it runs beside it, and all of it where
compute waits; its time is at least its bytes at the best rate of the network, however they are
bucketed. A weight is gathered for each run of the graphs or stays, which takes memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.costs import CollectiveKind, CostTable, collective_us
from torchloom.graph import PassContext, args_of, find, forward_nodes, is_view, nbytes, value_of
from torchloom.plan.frontier import MemorySource

AHEAD_FACTOR = 4
"""A plan tries buckets and prefetching divided by this factor, and prefetching multiplied by it."""
_SMALLEST = 1 << 12
"""Bytes: below this a message is all latency, and its rate no better than that of larger ones."""


class GatheredWeight(NamedTuple):
    """A weight that a graph gathers."""

    num_bytes: int
    """Of the whole weight."""
    num_runs: int
    """How often a run of forward and backward gathers it at least."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a joint graph sends, whatever is decided about it."""

    world_size: int = 1
    gathers: Mapping[str, GatheredWeight] = field(default_factory=dict)
    """By the names of parameters."""
    reductions: Mapping[CollectiveKind, int] = field(default_factory=dict)
    """Bytes by kind of collective."""
    in_flight_bytes: int = 0
    """What gathered weights may hold at a time where none stays: as much less may be needed at the
    peak where they do."""

    def bytes_of(self, name: str) -> int:
        """Return the bytes that a weight takes where it stays gathered; 0 where it is not gathered."""
        return self.gathers[name].num_bytes if name in self.gathers else 0

    def least_us(
        self, costs: CostTable, may_stay: Collection[str] = (), micro_steps: int = 1
    ) -> tuple[float, tuple[MemorySource, ...]]:
        """Return the least time when everything that may stay does, and what the others cost more.

        Args:
            costs: times of collectives.
            may_stay: parameters that may stay gathered from step to step.
            micro_steps: runs of the graphs per optimizer step: what stays is gathered once in it.
        """
        load = costs.network.load
        floor_us = load * sum(
            num_bytes * self._least_us_per_byte(kind, num_bytes, costs)
            for kind, num_bytes in self.reductions.items()
        )
        total = sum(each.num_bytes for each in self.gathers.values())
        us_per_byte = self._least_us_per_byte("all_gather", total, costs)
        sources = []
        for name, (num_bytes, num_runs) in self.gathers.items():
            sent_us = load * us_per_byte * num_bytes * num_runs
            kept_us = us_per_byte * num_bytes / micro_steps  # compute waits for these
            if name not in may_stay:
                floor_us += sent_us
                continue
            floor_us += min(kept_us, sent_us)
            if num_runs > 1:  # else it may live through forward and backward anyway
                sources.append(MemorySource(max(0.0, sent_us - kept_us) / num_bytes, num_bytes))
        return floor_us, tuple(sources)

    def _least_us_per_byte(self, kind: CollectiveKind, num_bytes: int, costs: CostTable) -> float:
        """Return the least time per byte of any bucket, in microseconds."""
        sizes = [num_bytes] if num_bytes else []
        size = _SMALLEST
        while size < num_bytes:
            sizes.append(size)
            size *= 2
        return min(
            (collective_us(kind, each, self.world_size, costs) / each for each in sizes),
            default=0.0,
        )


class ConfiguredSizes(NamedTuple):
    """Sizes of a graph's transfers, in bytes, where no plan decides them."""

    gather_bytes: int
    """Gathers are merged up to this size."""
    reduce_bytes: int
    """Reductions are merged up to this size."""
    prefetch_bytes: int
    """Weights gathered ahead of their use."""


def traffic_of(joint: fx.Graph, context: PassContext, sizes: ConfiguredSizes) -> Traffic:
    """Return the transfers of a joint graph that no plan changes.

    Args:
        joint: the graph.
        context: the ranks that share its weights.
        sizes: what may be in flight.
    """
    world_size, forward = context.world_size, set(forward_nodes(joint))
    gathers: dict[str, GatheredWeight] = {}
    if context.shared_weights is None:  # otherwise graphs read whole weights in shared memory
        for node in find(joint, ops.gather):
            shard, _shape, dtype, *_, name = args_of(node)
            num_bytes = value_of(shard).numel() * world_size * dtype.itemsize
            known = gathers.get(name, GatheredWeight(0, 2))
            num_runs = min(known.num_runs, _num_runs(node, forward))
            gathers[name] = GatheredWeight(known.num_bytes + num_bytes, num_runs)
    reductions: dict[CollectiveKind, int] = {
        "reduce_scatter": sum(nbytes(args_of(n)[0]) for n in find(joint, ops.reduce)),
        "all_reduce": sum(nbytes(args_of(n)[0]) for n in find(joint, ops.sync)),
    }
    # A bucket in use, those ahead of it, and one weight that is larger than a bucket.
    ahead_bytes = AHEAD_FACTOR * sizes.prefetch_bytes
    largest_bytes = max((each.num_bytes for each in gathers.values()), default=0)
    in_flight_bytes = sizes.gather_bytes + ahead_bytes + largest_bytes
    return Traffic(world_size, gathers, reductions, in_flight_bytes)


def _num_runs(gather: fx.Node, forward: Collection[fx.Node]) -> int:
    """Return how often a run gathers a weight: 2 if backward reads it too and may gather it again."""
    if gather.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
        return 1
    chain = [gather]
    for node in chain:  # grows while it is walked
        if any(user not in forward and user.op == "call_function" for user in node.users):
            return 2
        chain += [user for user in node.users if is_view(user)]
    return 1
