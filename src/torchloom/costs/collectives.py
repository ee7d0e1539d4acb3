"""How long collectives take: by what was measured on this machine, else by a model of its network."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torchloom.errors import PlanError

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
"""As torchloom's own transport runs them over messages; `shm_` in front: through shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Alpha-beta model of collectives between ranks: a latency per message, a time per byte."""

    name: str
    alpha_us: float
    """Latency of one message between two ranks."""
    bytes_per_s: float
    """What one rank sends per second while it receives as much."""
    load: float = 0.0
    """Part of a collective's time that compute beside it loses: cores, memory, multiprocessors."""
    on_cores: bool = True
    """Whether the cores that compute move the bytes: transfers run instead of compute rather than beside it."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured time over modelled time, by kind of collective."""
    prefix: str = ""
    """What stands in front of the kinds of its measured collectives; see `CollectiveKind`."""
    is_tree: bool = False
    """Whether latencies add up with the logarithm of the number of ranks, not with the number: NCCL's trees for
    small messages, and its rings for large ones, whose steps overlap."""
    inner: Network | None = None
    """What connects the ranks of one host, where this row connects hosts."""
    ranks_per_host: int = 8

    def collective_us(self, kind: CollectiveKind, num_bytes: int, world_size: int) -> float:
        """Return the time of one collective by the ring model.

        Over hosts, a ring leaves each host through all of its adapters, one for each rank, so a rank sends as
        fast as they do together, unless the links inside of the host are slower: MPT-13B on 16 to 64 H100s
        keeps the step time of 8 (mosaicml/llm-foundry, scripts/train/benchmarking), which one adapter at 45 GB/s
        for each rank would double.

        Args:
            kind: which collective.
            num_bytes: bytes of the whole tensor: what an all-gather returns, what a reduce-scatter
                or an all-reduce takes.
            world_size: ranks that take part.
        """
        if world_size <= 1:
            return 0.0
        rate = self.bytes_per_s
        if self.inner is not None:
            if world_size <= self.ranks_per_host:
                return self.inner.collective_us(kind, num_bytes, world_size)
            rate = min(self.ranks_per_host * rate, self.inner.bytes_per_s)
        share = (world_size - 1) / world_size
        once = math.ceil(math.log2(world_size)) if self.is_tree else world_size - 1
        rounds, volume = {
            "all_gather": (once, share),
            "reduce_scatter": (once, share),
            "all_reduce": (2 * once, 2 * share),
            "broadcast": (once, 1.0),
        }[kind]
        modelled = rounds * self.alpha_us + 1e6 * volume * num_bytes / rate
        return self.factors.get(kind, 1.0) * modelled


# What compute beside NCCL loses, and what overlap does not reach, fitted to published runs (`bench/simulate.py`): MPT-13B
# at 4,096 tokens a rank, where the network is busy for a third of the step, beside MPT-7B at 12,288.
_NCCL_LOAD = 0.7

NETWORKS: dict[str, Network] = {
    row.name: row
    for row in (
        # Two ranks of one host, measured: 16 MB all-gather 6-7 ms, 1 MB 0.4 ms; a reduction adds
        # what it gets, and takes about 2.5 times as long.
        Network(
            name="gloo",
            alpha_us=120.0,
            bytes_per_s=1.2e9,
            load=0.5,  # estimated: its threads run on the cores that compute
            factors={"reduce_scatter": 2.2, "all_reduce": 0.8},
        ),
        # Measured beside gloo: small messages take half as long, a gather with its copy as long, a
        # reduction a third. The thread that computes does it all: nothing runs beside compute.
        Network(
            name="shared-memory",
            alpha_us=60.0,
            bytes_per_s=1.3e9,
            load=1.0,
            factors={"reduce_scatter": 0.85, "all_reduce": 0.9},
            prefix="shm_",
        ),
        Network(
            name="nvlink",
            alpha_us=6.0,
            bytes_per_s=3.6e11,
            load=_NCCL_LOAD,
            on_cores=False,
            is_tree=True,
        ),
        Network(
            name="infiniband-400",
            alpha_us=12.0,
            bytes_per_s=4.5e10,
            load=_NCCL_LOAD,
            on_cores=False,
            is_tree=True,
        ),
        # Hosts of eight A100s with 1,600 Gb/s in all, as clouds rent them.
        Network(
            name="ethernet-200",
            alpha_us=20.0,
            bytes_per_s=2.2e10,
            load=_NCCL_LOAD,
            on_cores=False,
            is_tree=True,
        ),
    )
}
"""Known networks by name."""
_SHORT = {"ib400": "infiniband-400", "eth200": "ethernet-200"}


def network_row(name: str) -> Network:
    """Return a network's row, or two of them as one: "nvlink+ib400" inside of hosts of eight, and between them.

    Raises:
        PlanError: no such row.
    """
    inside, plus, between = name.partition("+")
    rows = [_SHORT.get(each, each) for each in ((inside, between) if plus else (inside,))]
    unknown = [each for each in rows if each not in NETWORKS]
    if unknown:
        raise PlanError(
            f"unknown network {unknown[0]!r}: known are {', '.join(NETWORKS)}, and two joined by + such as nvlink+ib400"
        )
    if not plus:
        return NETWORKS[rows[0]]
    return replace(NETWORKS[rows[1]], name=name, inner=NETWORKS[rows[0]])


@dataclass(kw_only=True)
class CollectiveTimes:
    """A network, and the collectives that were measured on it."""

    network: Network = field(default_factory=lambda: NETWORKS["gloo"])
    collectives: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Measured (bytes, microseconds) in rising order, by `"all_gather/2"`: kind and ranks."""


def collective_us(
    kind: CollectiveKind, num_bytes: int, world_size: int, table: CollectiveTimes
) -> float:
    """Return the time of a collective between `world_size` ranks, in microseconds.

    Measured figures are interpolated between sizes. For a number of ranks that was not measured
    the model is scaled by how far it was off for the nearest number that was.

    Args:
        kind: which collective.
        num_bytes: bytes of the whole tensor: what an all-gather returns, what a reduce-scatter or
            an all-reduce takes.
        world_size: ranks that take part.
        table: whose network and measured figures count.
    """
    if world_size <= 1:
        return 0.0
    modelled = table.network.collective_us(kind, num_bytes, world_size)
    entry = f"{table.network.prefix}{kind}/"
    known = [int(key.removeprefix(entry)) for key in table.collectives if key.startswith(entry)]
    if not known:
        return modelled
    nearest = min(known, key=lambda ranks: (abs(ranks - world_size), ranks))
    measured = _interpolated(table.collectives[f"{entry}{nearest}"], num_bytes)
    if nearest == world_size:
        return measured
    return modelled * measured / table.network.collective_us(kind, num_bytes, nearest)


def between_copies_us(
    num_bytes: int, world_size: int, copies: int, table: CollectiveTimes
) -> float:
    """Return the time in which ranks that hold the same shard of several copies average it, in microseconds.

    Args:
        num_bytes: of the shard.
        world_size: ranks that share one copy.
        copies: of the weights.
        table: see `collective_us`.
    """
    network = table.network
    if network.inner is not None and world_size * copies > network.ranks_per_host:
        # One of them lives in each host: each sends by its own adapter.
        table = replace(table, network=replace(network, inner=None))
    return collective_us("all_reduce", num_bytes, copies, table)


def _interpolated(points: list[tuple[int, float]], num_bytes: int) -> float:
    """Return the time of a size between measured ones; beyond them the last rate holds."""
    sizes = [size for size, _ in points]
    at = bisect.bisect_left(sizes, num_bytes)
    if at == 0 or len(points) == 1:
        first_size, first_us = points[0]
        return first_us * max(1.0, num_bytes / first_size)
    (low, low_us), (high, high_us) = points[min(at, len(points) - 1) - 1 :][:2]
    slope = max(0.0, (high_us - low_us) / (high - low))
    return low_us + slope * (num_bytes - low)
