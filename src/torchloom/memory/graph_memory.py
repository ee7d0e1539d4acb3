"""The memory events of a graph that runs boxed: what each node allocates and what dies after it.

A boxed graph empties its list of inputs and drops every value after its last use, so a storage
lives from the node that made it to the last reader of any value in it. Sources: torch.fx's code
generation (`x = None` behind the last use), torch's calling convention for boxed functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchloom import ops
from torchloom.graph import args_of, is_view_op, value_of, viewed
from torchloom.memory.storages import Storage, Transit, storages_of
from torchloom.memory.workspace import Probed
from torchloom.ops.regions import half_of_node, inputs_of, is_call_of_body

Probe = Callable[[fx.Node], Probed | None]
"""What an operator was found to allocate; see `WorkspaceTable`."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes that one node allocates, frees, and needs while it runs."""

    node: fx.Node
    allocated_bytes: int
    freed_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage, or what a collective holds, and from which node to which it is alive."""

    storage: Storage | None
    """None for what a collective holds."""
    num_bytes: int
    maker: fx.Node
    begin: int
    """Place of the node that allocates it; -1: it is there at the start."""
    end: int | None
    """Place of the node after which it is freed; None: it outlives the graph."""

    def spans(self, place: int) -> bool:
        """Return whether it is alive while the node at a place runs."""
        return self.begin <= place and (self.end is None or place <= self.end)


@dataclass(slots=True)
class GraphMemory:
    """The nodes of one graph in order, with the storages that outlive it."""

    steps: list[NodeMemory] = field(default_factory=list)
    results: dict[Storage, int] = field(default_factory=dict)
    """Storages that this graph allocated and its outputs hold."""
    lives: list[Lifetime] = field(default_factory=list)
    """What is alive when, where that was asked for."""

    @property
    def peak_bytes(self) -> int:
        """Highest sum of bytes allocated above what was live at the start."""
        return max((peak for _, peak in self.curve()), default=0)

    def curve(self) -> list[tuple[int, int]]:
        """Return bytes after each step and the highest while it ran, relative to the start."""
        live, found = 0, []
        for step in self.steps:
            live += step.allocated_bytes
            found.append((live - step.freed_bytes, live + step.workspace_bytes))
            live -= step.freed_bytes
        return found


def graph_memory_of(
    nodes: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    *,
    held: Collection[Storage],
    sizes: Mapping[Storage, int] | None = None,
    probe: Probe | None = None,
    transit: Transit | None = None,
    scratch: Mapping[fx.Node, int] | None = None,
    keeps_lives: bool = False,
) -> GraphMemory:
    """Return the memory events of nodes that run in this order.

    Args:
        nodes: placeholders and calls in order; the output node is not among them.
        outputs: values that outlive the graph.
        held: storages of inputs that somebody else keeps alive: parameters, the batch.
        sizes: bytes of inputs' storages, where they are not what their fake tensors say.
        probe: what operators allocate besides what the graph shows.
        transit: what collectives hold until they are waited for.
        scratch: what nodes hold while they run, besides what the probe says.
        keeps_lives: whether the program says what is alive when.

    Returns:
        The program. Inputs that nobody holds are live at the start and are freed after their last
        use; their bytes are not allocated here.
    """
    order, beside = [node for node in nodes if node.op != "output"], scratch or {}
    probed = [None if probe is None else probe(node) for node in order]
    owned: dict[Storage, int] = {}
    known: set[Storage] = set(held)
    last_use: dict[Storage, int] = {}
    fresh, dying = [0] * len(order), [0] * len(order)
    parts: dict[fx.Node, dict[Storage, int]] = {}
    lives: list[Lifetime] = []
    makers: dict[Storage, tuple[fx.Node, int]] = {}
    for index, node in enumerate(order):
        storages = parts[node] = _storages(node, probed[index], parts)
        if node.op == "get_attr":
            known.update(storages)
            continue
        for storage, size in storages.items():
            if storage not in known:
                known.add(storage)
                owned[storage] = (sizes or {}).get(storage, size)
                fresh[index] += 0 if node.op == "placeholder" else size
                makers[storage] = node, -1 if node.op == "placeholder" else index
            last_use[storage] = index
        for used in node.all_input_nodes:
            last_use.update(dict.fromkeys(parts[used], index))
    if transit is not None:
        for start, end, num_bytes in _under_way(order, transit):
            fresh[start] += num_bytes
            dying[end] += num_bytes
            lives.append(Lifetime(None, num_bytes, order[start], start, end))
    kept = {s: owned[s] for node in outputs for s in parts[node] if s in owned}
    ends = {storage: last_use[storage] for storage in owned if storage not in kept}
    for storage, index in ends.items():
        dying[index] += owned[storage]
    beside = {**beside, **_beside_calls(order, parts, fresh, owned, ends, probe)}
    steps = [
        NodeMemory(
            node=node,
            allocated_bytes=fresh[index],
            freed_bytes=dying[index],
            workspace_bytes=getattr(probed[index], "workspace_bytes", 0) + beside.get(node, 0),
        )
        for index, node in enumerate(order)
    ]
    if keeps_lives:
        for storage, size in owned.items():
            maker, begin = makers[storage]
            end = None if storage in kept else last_use[storage]
            lives.append(Lifetime(storage, size, maker, begin, end))
    return GraphMemory(steps, kept, lives if keeps_lives else [])


def _beside_calls(
    order: Sequence[fx.Node],
    parts: Mapping[fx.Node, dict[Storage, int]],
    fresh: Sequence[int],
    owned: Mapping[Storage, int],
    ends: Mapping[Storage, int],
    probe: Probe | None,
) -> dict[fx.Node, int]:
    """Return what bodies hold while they run, beside what their calls return.

    Less than nothing where a body frees more than it returns before it returns it.
    """
    known: dict[Hashable, int] = {}
    found: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        if is_call_of_body(node):
            operands = [parts.get(each, {}) for each in inputs_of(node)]
            freed = {storage: owned[storage] for storage, end in ends.items() if end == index}
            graph = half_of_node(node).graph_module.graph
            sizes = _given_up(graph, operands, freed)
            # A body that is called like another one, with operands that die in the same places, has the same peak.
            key = graph, frozenset(sizes.items())
            if key not in known:
                known[key] = _peak_of_body(graph, sizes, probe)
            found[node] = known[key] - fresh[index]
    return found


def _peak_of_body(graph: fx.Graph, sizes: Mapping[Storage, int], probe: Probe | None) -> int:
    """Return the highest sum of bytes while a body runs, above what was live before its call.

    Args:
        graph: of the body.
        sizes: storages of its inputs that nobody reads afterwards, with their bytes: the body frees them.
        probe: what operators allocate besides what the graph shows.
    """
    taken = {own for node in graph.find_nodes(op="placeholder") for own in storages_of(node)}
    outputs = graph.output_node().all_input_nodes
    held = taken - sizes.keys()
    return graph_memory_of(graph.nodes, outputs, held=held, sizes=sizes, probe=probe).peak_bytes


def _given_up(
    graph: fx.Graph, operands: Sequence[Mapping[Storage, int]], freed: Mapping[Storage, int]
) -> dict[Storage, int]:
    """Return the storages of a body's inputs that die in its call, with their bytes.

    Of several operands that are one storage, it dies with the one that is read last.
    """
    inputs = graph.find_nodes(op="placeholder")
    last_use = {used: at for at, node in enumerate(graph.nodes) for used in node.all_input_nodes}
    ends: dict[Storage, int] = {}
    for index, outside in enumerate(operands):
        for storage in outside.keys() & freed.keys():
            other = ends.get(storage, index)
            ends[storage] = max(other, index, key=lambda i: last_use.get(inputs[i], -1))
    found: dict[Storage, int] = {}
    for storage, index in ends.items():
        for own in storages_of(inputs[index]):
            found[own] = found.get(own, 0) + freed[storage]
    return found


def _storages(
    node: fx.Node, found: Probed | None, parts: Mapping[fx.Node, dict[Storage, int]]
) -> dict[Storage, int]:
    seen = viewed(node) if is_view_op(_origin(node).target) else None
    if seen is not None and seen in parts:
        return parts[seen]  # what was recorded may stem from before a pass replaced it
    return storages_of(node, () if found is None else found.result_bytes)


def _origin(node: fx.Node) -> fx.Node:
    """Return the call that made a value: of what picks one of several results, their maker."""
    picks = node.target is operator.getitem and node.all_input_nodes
    return node.all_input_nodes[0] if picks else node


def _under_way(order: Sequence[fx.Node], transit: Transit) -> Iterator[tuple[int, int, int]]:
    """Yield for each collective the places of its start and its wait, and what it holds between."""
    where = {node: index for index, node in enumerate(order)}
    for index, node in enumerate(order):
        if node.target is ops.wait_:
            start: fx.Node = args_of(node)[0][0].all_input_nodes[0]
            args: Any = fx.node.map_arg(start.args, value_of)
            num_bytes = transit.started_bytes(start.target, args)
            if num_bytes:
                yield where[start], index, num_bytes
