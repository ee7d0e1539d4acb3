"""Times, sizes and memory of a graph's nodes, under the names that DeepCompile's passes read.

The cost table and a liveness analysis give all figures; the graph is never run for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from torchloom.costs import CostTable, node_us
from torchloom.costs.timeline import transfer_us
from torchloom.graph import live_bytes, nbytes, viewed


@dataclass(eq=False)
class ProfilingResult:
    """Figures of one captured graph; times in milliseconds, sizes in bytes."""

    fwd_graph: fx.Graph | None = None
    bwd_graph: fx.Graph | None = None
    needs_backward: bool = False
    num_fwd_outputs: int = 0
    """Results of the forward graph that the model returns; those after them are kept for backward."""
    fwd_mem: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Of each node: name, bytes alive after it, change that it made, most bytes alive during it."""
    bwd_mem: list[tuple[str, int, int, int]] = field(default_factory=list)
    fwd_mem_complete: bool = False
    bwd_mem_complete: bool = False
    fwd_time: list[tuple[str, float, float]] = field(default_factory=list)
    """Of each node: name, time on the device, time on the clock."""
    bwd_time: list[tuple[str, float, float]] = field(default_factory=list)
    fwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)
    """Of each node: name, bytes of its value."""
    bwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)
    param_indices: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """Of each parameter: its place among the graph's inputs, its id, the shape of the weight."""

    def take(self, graph: fx.Graph, is_backward: bool, table: CostTable, world_size: int) -> None:
        """Fill in the figures of the forward or of the backward graph as it is now.

        Args:
            graph: forward or backward, after the split.
            is_backward: which of them.
            table: costs of operators and links of this machine.
            world_size: ranks that take part in a collective.
        """
        times = node_times(graph, table, world_size)
        memory = memory_of(graph)
        sizes = [(node.name, nbytes(node)) for node in graph.nodes]
        for node, (_, _, delta, peak), (_, size) in zip(graph.nodes, memory, sizes, strict=True):
            # The names under which DeepCompile's passes find them.
            node.meta["device_time"] = node.meta["wall_time"] = times[node]
            node.meta["alloc_mem"], node.meta["max_mem"] = delta, peak
            node.meta["tensor_size"] = size
        clock = [(node.name, ms, ms) for node, ms in times.items()]
        if is_backward:
            self.bwd_graph, self.bwd_mem, self.bwd_time = graph, memory, clock
            self.bwd_tensor_sizes, self.bwd_mem_complete = sizes, True
        else:
            self.fwd_graph, self.fwd_mem, self.fwd_time = graph, memory, clock
            self.fwd_tensor_sizes, self.fwd_mem_complete = sizes, True


def node_times(graph: fx.Graph, table: CostTable, world_size: int) -> Mapping[fx.Node, float]:
    """Return the modelled time of each node in milliseconds; a transfer's is that of its start.

    Args:
        graph: the graph.
        table: costs of operators and links of this machine.
        world_size: ranks that take part in a collective.
    """
    return {
        node: (node_us(node, table) + transfer_us(node, table, world_size)) / 1e3
        for node in graph.nodes
    }


def memory_of(graph: fx.Graph) -> list[tuple[str, int, int, int]]:
    """Return name, bytes alive after it, change and peak of each node."""
    found = []
    alive = 0
    for node, after in zip(graph.nodes, live_bytes(graph), strict=True):
        own = 0 if node.op == "output" or viewed(node) is not None else nbytes(node)
        found.append((node.name, after, after - alive, max(alive + own, after)))
        alive = after
    return found
