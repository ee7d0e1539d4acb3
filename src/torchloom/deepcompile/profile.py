"""Times, sizes and memory of a graph's nodes, under the names that DeepCompile's passes read.

The cost table gives times, and the planner's account of memory gives bytes: operators run once, alone, for what they
allocate besides their results; the graph is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from torchloom.costs import CostTable, node_us
from torchloom.costs.timeline import transfer_us
from torchloom.graph import nbytes
from torchloom.memory import Transit, WorkspaceTable, graph_memory_of, micro_step, storages_of


@dataclass
class Account:
    """What is allocated beside the values of a graph."""

    base_bytes: int = 0
    """Parameters, optimizer states: what lives on from step to step, as the planner counts it."""
    counts_gradients: bool = False
    """Whether gradients are part of it, as they wait from one micro-step for the next."""
    step_bytes: int = 0
    """With what the optimizer's step allocates."""
    workspaces: WorkspaceTable = field(default_factory=WorkspaceTable)
    transit: Transit | None = None
    """What collectives hold until they are waited for."""


@dataclass(eq=False)
class ProfilingResult:
    """Figures of one captured graph; times in milliseconds, sizes in bytes."""

    fwd_graph: fx.Graph | None = None
    bwd_graph: fx.Graph | None = None
    needs_backward: bool = False
    num_fwd_outputs: int = 0
    """Results of the forward graph that the model returns; those after them are kept for backward."""
    fwd_mem: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Of each node: name, bytes allocated on the device after it, change that it made, most bytes during it.

    All that a step allocates is in them, as in DeepSpeed's: weights, optimizer states, the batch, what forward kept."""
    bwd_mem: list[tuple[str, int, int, int]] = field(default_factory=list)
    fwd_mem_complete: bool = False
    bwd_mem_complete: bool = False
    fwd_time: list[tuple[str, float, float]] = field(default_factory=list)
    """Of each node: name, time on the device, time on the clock."""
    bwd_time: list[tuple[str, float, float]] = field(default_factory=list)
    fwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)
    """Of each node: name, bytes of its value."""
    bwd_tensor_sizes: list[tuple[str, int]] = field(default_factory=list)
    kept_bytes: int = 0
    """Results and values for backward that the forward graph leaves."""
    param_indices: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """Of each parameter: its place among the graph's inputs, its id, the shape of the weight."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device in the graphs known so far."""
        return max((most for *_, most in self.fwd_mem + self.bwd_mem), default=0)

    def take(
        self,
        graph: fx.Graph,
        is_backward: bool,
        table: CostTable,
        world_size: int,
        account: Account,
        start_bytes: int,
    ) -> None:
        """Fill in the figures of the forward or of the backward graph as it is now.

        Args:
            graph: forward or backward, after the split.
            is_backward: which of them.
            table: costs of operators and links of this machine.
            world_size: ranks that take part in a collective.
            account: what is allocated beside the graph's values.
            start_bytes: what is on the device before it, but for what its own forward kept.
        """
        times = node_times(graph, table, world_size)
        memory = memory_of(
            graph, account, start_bytes, forward=self.fwd_graph if is_backward else None
        )
        sizes = [(node.name, nbytes(node)) for node in graph.nodes]
        for node, (_, _, delta, peak), (_, size) in zip(graph.nodes, memory, sizes, strict=True):
            # The names under which DeepCompile's passes find them.
            node.meta["device_time"] = node.meta["wall_time"] = times[node]
            node.meta["alloc_mem"], node.meta["max_mem"] = delta, peak
            node.meta["tensor_size"] = size
        found = {
            "graph": graph,
            "mem": memory,
            "mem_complete": True,
            "time": [(node.name, ms, ms) for node, ms in times.items()],
            "tensor_sizes": sizes,
        }
        for name, value in found.items():
            setattr(self, f"{'bwd' if is_backward else 'fwd'}_{name}", value)
        if not is_backward:
            self.kept_bytes = memory[-1][1] - start_bytes


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


def memory_of(
    graph: fx.Graph, account: Account, start_bytes: int, forward: fx.Graph | None = None
) -> list[tuple[str, int, int, int]]:
    """Return name, bytes allocated after it, change and peak of each node.

    Args:
        graph: forward or backward, after the split.
        account: what is allocated beside the graph's values.
        start_bytes: what is allocated before it, but for what its own forward kept.
        forward: of which `graph` is the backward graph.
    """
    account.workspaces.probe(graph.nodes)
    if forward is None:
        program = graph_memory_of(
            graph.nodes,
            graph.output_node().all_input_nodes,
            held={
                each for node in graph.find_nodes(op="placeholder") for each in storages_of(node)
            },
            probe=account.workspaces,
            transit=account.transit,
        )
    else:
        step = micro_step(forward, graph, probe=account.workspaces, transit=account.transit)
        program = step.backward
        start_bytes += step.after_forward_bytes + step.seed_bytes
    found, alive = [], start_bytes
    for each, (after, most) in zip(program.steps, program.curve(), strict=True):
        after, most = start_bytes + after, start_bytes + most
        found.append((each.node.name, after, after - alive, most))
        alive = after
    return [*found, (graph.output_node().name, alive, 0, alive)]
