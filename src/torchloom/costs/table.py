"""The cost table: one device's figures, and how long nodes, copies and collectives take by them.

Figures that were measured on this machine win; the roofline and the alpha-beta model answer where
there are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from torchloom.costs.collectives import CollectiveTimes, Network
from torchloom.costs.hardware import DEVICES, Device, LinkKind
from torchloom.costs.measure import can_measure, measure_node
from torchloom.costs.roofline import is_computed, roofline_us
from torchloom.costs.signature import node_key

CORE_SHARE = "core_share"
"""The figure of a CPU's table that says which part of a core each rank has: operators are timed by a thread's own clock."""


@dataclass(kw_only=True)
class CostTable(CollectiveTimes):
    """Figures of one device and its links.

    Example:
        >>> table = CostTable()  # a CPU, modelled
        >>> link_us("h2d", 1 << 20, table) > 0
        True
    """

    device: Device = field(default_factory=lambda: DEVICES["cpu"])
    ops: dict[str, float] = field(default_factory=dict)
    """Measured microseconds by signature (`node_key`)."""
    figures: dict[str, float] = field(default_factory=dict)
    """What else `torchloom calibrate` measured, by name with unit."""

    @property
    def core_share(self) -> float:
        """Which part of a core each rank has while all compute, at most 1."""
        return self.figures.get(CORE_SHARE, 1.0)

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


def load_figure(network: str) -> str:
    """Return the name of the figure that says what collectives over a network take from compute beside them."""
    return f"{network}_load"


def over_network(table: CostTable, network: Network) -> CostTable:
    """Return a table for ranks that talk over a network; what its collectives take from compute as it was measured.

    Args:
        table: of this machine.
        network: a row of `NETWORKS`; its own figure counts where nothing was measured.
    """
    load = table.figures.get(load_figure(network.name), network.load)
    return replace(table, network=replace(network, load=load))


def node_us(node: fx.Node, table: CostTable) -> float:
    """Return how long a node keeps the compute engine busy, in microseconds.

    Inputs, views and our communication take none. A compiler that fuses elementwise operators
    makes their sum smaller than the sum of these.
    """
    if not is_computed(node):
        return 0.0
    measured = measured_us(node, table)
    alone_us = roofline_us(node, table.device) if measured is None else measured
    return alone_us / table.core_share


def measured_us(node: fx.Node, table: CostTable) -> float | None:
    """Return the measured time of a node in microseconds, None where there is none."""
    ops = table.ops
    if not ops or not is_computed(node):
        return None
    return ops.get(node_key(node))


def graph_us(graph: fx.Graph, table: CostTable) -> list[tuple[fx.Node, float]]:
    """Return each node with its time in microseconds, in execution order."""
    return [(node, node_us(node, table)) for node in graph.nodes]


def link_us(kind: LinkKind, num_bytes: int, table: CostTable) -> float:
    """Return the time of a copy between host and device, in microseconds.

    Args:
        kind: "h2d" to the device, "d2h" to the host.
        num_bytes: what is copied.
        table: whose device counts.
    """
    device = table.device
    rate = device.h2d_bytes_per_s if kind == "h2d" else device.d2h_bytes_per_s
    return device.link_latency_us + 1e6 * num_bytes / rate
