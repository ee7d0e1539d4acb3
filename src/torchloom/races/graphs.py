"""The schedule of a lowered graph: what its nodes read, write and free, in their order.

Memory is freed by `free_`, or after the last node that mentions it, which is what boxed execution does and the
earliest that any compiler may. Inputs count as freed, too: saved activations are, and of others it
demands no more than that nothing still uses them when the graph ends. Weights that outlive the graph, or that other
ranks read, count as read by a transfer: until the graph ends, or until `symmetric_done_`, which frees them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import argument, find, owners, value_of, viewed, written
from torchloom.races.check import Engine, Event, Free, Start, TransferSchedule, Use, WaitFor

_ENGINE: dict[object, Engine] = {
    ops.offload_start: "to_host",
    ops.reload_start: "to_device",
    ops.gather_start: "network",
    ops.reduce_start: "network",
    ops.sync_start: "network",
    ops.symmetric_start: "network",
    ops.resident: "network",
}
_FREEING = (ops.free_, ops.symmetric_done_)
_MAY_COPY = (torch.ops.aten.reshape, torch.ops.aten.contiguous, torch.ops.aten.to)
"""Operators that read what they view where they have to copy it."""
Memories = Mapping[fx.Node, str]


@dataclass(frozen=True, slots=True)
class GraphSchedule(TransferSchedule):
    """The events of a graph, and the nodes that they are of."""

    graph: fx.Graph = field(kw_only=True)
    memories: Memories = field(kw_only=True)
    """Of each node with a tensor: the name of its memory, which is the first node that holds it."""
    issued_by: tuple[str, ...] = field(kw_only=True)
    """The node that issues each event."""


def schedule_of(graph: fx.Graph) -> GraphSchedule:
    """Return what a lowered graph issues, for `find_races`."""
    memories = {node: root.name for node, root in owners(graph).items()}
    touched = {node: _touched(node, memories) for node in graph.nodes}
    deaths = _deaths(touched)
    given: set[str] = set()
    events: list[Event] = []
    issued_by: list[str] = []
    for node, (reads, writes) in touched.items():
        is_given = node.op in ("placeholder", "get_attr")
        given |= writes if is_given else set()
        issued = [] if is_given else _events(node, reads, writes, memories)
        issued += map(Free, deaths.get(node, ()))
        events += issued
        issued_by += [node.name] * len(issued)
    return GraphSchedule(
        tuple(events), frozenset(given), graph=graph, memories=memories, issued_by=tuple(issued_by)
    )


def held_by(nodes: Iterable[fx.Node], memories: Memories) -> frozenset[str]:
    """Return the memories of nodes; for a list, which torch may leave unrecorded, those of its parts.

    Args:
        nodes: any nodes of the graph.
        memories: those of the graph.
    """
    found: set[str] = set()
    for node in nodes:
        parts = [node]
        if not isinstance(value_of(node), torch.Tensor):
            parts += [each for each in (viewed(node), *picks_of(node)) if each is not None]
        found |= {memories[part] for part in parts if part in memories}
    return frozenset(found)


def picks_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that take a result, also a nested one, out of a call's list of results."""
    found = [node]
    for each in found:  # grows while it is walked: results may be nested
        found += [user for user in each.users if user.target is operator.getitem]
    return found[1:]


def _touched(node: fx.Node, memories: Memories) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a node reads, and what it makes or changes; a view or a pick does neither but mentions its own."""
    own = held_by((node,), memories)
    if node.target is operator.getitem and own:
        return own, frozenset()
    reads = held_by(node.all_input_nodes, memories)
    return reads, (own - reads) | held_by(written(node), memories)


def _events(
    node: fx.Node, reads: frozenset[str], writes: frozenset[str], memories: Memories
) -> list[Event]:
    if node.op == "output":
        kept = find(node.graph, ops.resident)
        return [*(WaitFor(each.name) for each in kept), Use(node.name, reads)]
    if node.target is ops.wait_:
        start = _start_of(node)
        waited: Event = WaitFor("" if start is None else start.name)
        is_shared = start is not None and start.target is ops.symmetric_start
        return [waited, Start(node.name, "network", writes, frozenset())] if is_shared else [waited]
    if node.target in _FREEING:
        freed: list[fx.Node] = []  # with repetitions
        fx.node.map_arg((node.args, node.kwargs), freed.append)
        ends = [user for user in freed[0].users if user.target is ops.wait_] if freed else []
        waits = [WaitFor(each.name) for each in ends if node.target is ops.symmetric_done_]
        frees = [Free(memory) for each in freed for memory in sorted(held_by((each,), memories))]
        return [*waits, *frees]
    if node.target in _ENGINE:
        return [Start(node.name, _ENGINE[node.target], reads, writes)]
    is_view = not writes and bool(held_by((node,), memories))
    if is_view and getattr(node.target, "overloadpacket", None) not in _MAY_COPY:
        return []
    return [Use(node.name, reads, writes)]


def _start_of(wait: fx.Node) -> fx.Node | None:
    """Return the start for whose results a node waits, all of them and by its handle; None where there is none."""
    results = argument(wait, 0, "results")
    starts = {each.args[0] if each.target is operator.getitem else None for each in results}
    start = starts.pop() if len(starts) == 1 else None
    if not isinstance(start, fx.Node) or start.target not in _ENGINE:
        return None
    schema = start.target._schema.arguments  # type: ignore[union-attr]
    given = {each.name: argument(start, i, each.name) for i, each in enumerate(schema)}
    waits_for_all = {each.args[1] for each in results} == set(range(len(given[schema[0].name])))
    # The handle of a reading of shared weights is not among its start's arguments.
    handle = argument(wait, 2, "handle")
    is_own = (
        given["handle"] == handle if "handle" in given else "weights" in given or handle == ops.HOST
    )
    return start if waits_for_all and is_own else None


def _deaths(
    touched: Mapping[fx.Node, tuple[frozenset[str], frozenset[str]]],
) -> dict[fx.Node, list[str]]:
    """Return the memories that die after each node; what the graph returns, frees itself or keeps does not."""
    last: dict[str, fx.Node] = {}
    freed: set[str] = set()
    for node, (reads, writes) in touched.items():
        last.update(dict.fromkeys(reads | writes, node))
        if node.target in (*_FREEING, ops.resident):
            freed |= reads
    found: dict[fx.Node, list[str]] = {}
    for memory, node in last.items():
        if node.op != "output" and memory not in freed:
            found.setdefault(node, []).append(memory)
    return found
