"""The schedule of a lowered graph: what its nodes read, write and free, in their order.

Memory is freed after the last node that mentions it, which is what boxed execution does and the
earliest that any compiler may. Inputs count as freed, too: saved activations are, and of others it
demands no more than that nothing still uses them when the graph ends.
"""

from __future__ import annotations

import operator

from torch import fx

from torchloom import ops
from torchloom._torch import OpOverload
from torchloom.graph import args_of, owners, viewed
from torchloom.races.events import Engine, Event, Free, Schedule, Start, Use, Wait

_ENGINE: dict[object, Engine] = {
    ops.offload_start: "to_host",
    ops.reload_start: "to_device",
    ops.gather_start: "network",
    ops.reduce_start: "network",
    ops.sync_start: "network",
    ops.symmetric_start: "network",
}


def schedule_of(graph: fx.Graph) -> Schedule:
    """Return what a lowered graph issues, for `find_races`."""
    owner = {node: root.name for node, root in owners(graph).items()}
    deaths = _deaths(graph, owner)
    events: list[Event] = []
    given: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            given |= {owner[node]} if node in owner else set()
        else:
            events += _events(node, owner)
        events += [Free(value) for value in deaths.get(node, ())]
    return Schedule(tuple(events), frozenset(given))


def _events(node: fx.Node, owner: dict[fx.Node, str]) -> list[Event]:
    if node.op == "output":
        return [Use("return", reads=_memories(node.all_input_nodes, owner))]
    if node.target is ops.wait_:
        results = args_of(node)[0]
        return [Wait(results[0].args[0].name)]
    reads, writes = _memories(node.all_input_nodes, owner), _written(node, owner)
    if node.target in _ENGINE:
        return [Start(node.name, _ENGINE[node.target], reads, writes)]
    if node.target is operator.getitem or (viewed(node) is not None and not _mutates(node)):
        return []
    return [Use(node.name, reads, writes)]


def _memories(nodes: list[fx.Node], owner: dict[fx.Node, str]) -> frozenset[str]:
    return frozenset(owner[node] for node in nodes if node in owner)


def _written(node: fx.Node, owner: dict[fx.Node, str]) -> frozenset[str]:
    """Memory that a call makes or changes: its result, its picks, and what its schema mutates."""
    made = [node]
    for each in made:  # grows while it is walked: results may be nested
        made += [user for user in each.users if user.target is operator.getitem]
    if isinstance(node.target, OpOverload):
        for arg, given in zip(node.target._schema.arguments, node.args, strict=False):
            if arg.alias_info is not None and arg.alias_info.is_write:
                made += given if isinstance(given, (list, tuple)) else [given]  # type: ignore
    fresh = [n for n in made if isinstance(n, fx.Node)]
    return _memories(fresh, owner)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _deaths(graph: fx.Graph, owner: dict[fx.Node, str]) -> dict[fx.Node, list[str]]:
    """Return the memories that die after each node; what the graph returns does not."""
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        for mentioned in (node, *node.all_input_nodes):
            if mentioned in owner:
                last[owner[mentioned]] = node
    found: dict[fx.Node, list[str]] = {}
    for memory, node in last.items():
        if node.op != "output":
            found.setdefault(node, []).append(memory)
    return found
