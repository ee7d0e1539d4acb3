"""The cost table: one device's figures, and how long nodes, copies and collectives take by them.

Figures that were measured on this machine win; the roofline and the alpha-beta model answer where
there are none.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from torchloom.costs.hardware import (
    DEVICES,
    NETWORKS,
    CollectiveKind,
    Device,
    LinkKind,
    Network,
)
from torchloom.costs.measure import can_measure, measure_node
from torchloom.costs.roofline import is_computed, roofline_us
from torchloom.costs.signature import node_key


@dataclass(kw_only=True)
class CostTable:
    """Figures of one device and its links.

    Example:
        >>> table = CostTable()  # a CPU, modelled
        >>> collective_us("all_gather", 1 << 20, 2, table) > 0
        True
    """

    device: Device = field(default_factory=lambda: DEVICES["cpu"])
    network: Network = field(default_factory=lambda: NETWORKS["gloo"])
    ops: dict[str, float] = field(default_factory=dict)
    """Measured microseconds by signature (`node_key`)."""
    collectives: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Measured (bytes, microseconds) in rising order, by `"all_gather/2"`: kind and ranks."""

    figures: dict[str, float] = field(default_factory=dict)
    """What else `torchloom calibrate` measured, by name with unit."""

    def measure(self, nodes: Iterable[fx.Node], budget_s: float = 0.1) -> int:
        """Measure the operators of nodes that the table does not know; return how many were.

        Each runs alone, on fresh random tensors; see `measure.measure_node`. What cannot be run
        alone stays modelled.

        Args:
            nodes: nodes of captured graphs.
            budget_s: seconds to spend on one operator, about.
        """
        num_measured = 0
        for node in nodes:
            if not can_measure(node):
                continue
            key = node_key(node)
            found = None if key in self.ops else measure_node(node, budget_s)
            if found is not None:
                self.ops[key] = found
                num_measured += 1
        return num_measured


def node_us(node: fx.Node, table: CostTable) -> float:
    """Return how long a node keeps the compute engine busy, in microseconds.

    Inputs, views and our communication take none. A compiler that fuses elementwise operators
    makes their sum smaller than the sum of these.
    """
    if not is_computed(node):
        return 0.0
    measured = measured_us(node, table)
    return roofline_us(node, table.device) if measured is None else measured


def measured_us(node: fx.Node, table: CostTable) -> float | None:
    """Return the measured time of a node in microseconds, None where there is none."""
    ops = table.ops
    if not ops or not is_computed(node):
        return None
    return ops.get(node_key(node))


def graph_us(graph: fx.Graph, table: CostTable) -> list[tuple[fx.Node, float]]:
    """Return each node with its time in microseconds, in execution order."""
    return [(node, node_us(node, table)) for node in graph.nodes]


def collective_us(kind: CollectiveKind, num_bytes: int, world_size: int, table: CostTable) -> float:
    """Return the time of a collective between `world_size` ranks, in microseconds.

    Measured figures are interpolated between sizes. For a number of ranks that was not measured
    the model is scaled by how far it was off for the nearest number that was.

    Args:
        kind: which collective.
        num_bytes: bytes of the whole tensor: what an all-gather returns, what a reduce-scatter or
            an all-reduce takes.
        world_size: ranks that take part.
        table: whose network to reckon with.
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


def link_us(kind: LinkKind, num_bytes: int, table: CostTable) -> float:
    """Return the time of a copy between host and device, in microseconds."""
    device = table.device
    rate = device.h2d_bytes_per_s if kind == "h2d" else device.d2h_bytes_per_s
    return device.link_latency_us + 1e6 * num_bytes / rate


def _interpolated(points: list[tuple[int, float]], num_bytes: int) -> float:
    """Return the time of a size between measured ones; beyond them the last rate goes on."""
    sizes = [size for size, _ in points]
    at = bisect.bisect_left(sizes, num_bytes)
    if at == 0 or len(points) == 1:
        first_size, first_us = points[0]
        return first_us * max(1.0, num_bytes / first_size)
    (low, low_us), (high, high_us) = points[min(at, len(points) - 1) - 1 :][:2]
    slope = max(0.0, (high_us - low_us) / (high - low))
    return low_us + slope * (num_bytes - low)
