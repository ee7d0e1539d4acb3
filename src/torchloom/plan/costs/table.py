"""The cost table: one device's figures, and how long nodes, copies and collectives take by them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from torchloom.plan.costs.hardware import (
    DEVICES,
    NETWORKS,
    CollectiveKind,
    Device,
    LinkKind,
    Network,
)
from torchloom.plan.costs.roofline import roofline_us


@dataclass(kw_only=True)
class CostTable:
    """Rates of one device and its links.

    Example:
        >>> table = CostTable()  # a CPU, modelled
        >>> collective_us("all_gather", 1 << 20, 2, table) > 0
        True
    """

    device: Device = field(default_factory=lambda: DEVICES["cpu"])
    network: Network = field(default_factory=lambda: NETWORKS["gloo"])


def node_us(node: fx.Node, table: CostTable) -> float:
    """Return how long a node keeps the compute engine busy, in microseconds."""
    return roofline_us(node, table.device)


def graph_us(graph: fx.Graph, table: CostTable) -> list[tuple[fx.Node, float]]:
    """Return each node with its time in microseconds, in execution order."""
    return [(node, node_us(node, table)) for node in graph.nodes]


def collective_us(kind: CollectiveKind, num_bytes: int, world_size: int, table: CostTable) -> float:
    """Return the time of a collective between `world_size` ranks, in microseconds.

    Args:
        kind: which collective.
        num_bytes: bytes of the whole tensor: what an all-gather returns, what a reduce-scatter or
            an all-reduce takes.
        world_size: ranks that take part.
        table: whose network to reckon with.
    """
    return table.network.collective_us(kind, num_bytes, world_size)


def link_us(kind: LinkKind, num_bytes: int, table: CostTable) -> float:
    """Return the time of a copy between host and device, in microseconds."""
    device = table.device
    rate = device.h2d_bytes_per_s if kind == "h2d" else device.d2h_bytes_per_s
    return device.link_latency_us + 1e6 * num_bytes / rate
