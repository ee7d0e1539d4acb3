"""Keep activations in host memory between forward and backward.

    before   x ... last forward use ....................... backward use of x
    after    x ... last forward use, h = offload(x) ....... y = reload(h), backward use of y

Without a plan, the pass moves all activations of at least `min_bytes` that the
partitioner would keep; of a view, the whole base. A plan names those that move. Backward recomputes from the reloaded y.

Values other than floating point, graph inputs and outputs and their views, symbolic shapes, and inputs of a
recomputed random operator stay. Changes no values.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom._torch.aot import MUST_BE_IN_BACKWARD
from torchloom._torch.operators import is_random
from torchloom.graph import (
    GraphSplit,
    PassContext,
    call,
    forward_nodes,
    inner_owners,
    mark_host,
    movable,
    nbytes,
    outputs_of,
    owners,
    positions,
    readers,
    split_of,
    storage_of,
    tag,
    value_of,
)


def offload_activation(
    gm: fx.GraphModule, ctx: PassContext, *, min_bytes: int = 1 << 20, pin_memory: bool = True
) -> int:
    """Insert an offload and a reload for each chosen activation; return how many.

    Args:
        gm: a joint graph; edited in place.
        ctx: not used.
        min_bytes: smaller activations stay on the device.
        pin_memory: whether host copies are page-locked where the device can use it.
    """
    split = split_of(gm)
    if split is None:
        return 0
    owner = movable(gm.graph)
    saved = [owner[node] for node in owner if node.name in split.saved]
    chosen = [node for node in saved if nbytes(node) >= min_bytes]
    return _Move(gm.graph, split, pin_memory).run(list(dict.fromkeys(chosen)))


def offload_named(
    gm: fx.GraphModule, names: frozenset[str], split: GraphSplit, *, pin: bool
) -> int:
    """Offload the named activations of a joint graph whose split a plan decides, not torch's min-cut.

    Args:
        gm: edited in place.
        names: of activations.
        split: the nodes of forward and of backward; backward recomputes those in both.
        pin: whether host copies are page-locked.

    Returns:
        How many activations move.

    Raises:
        ValueError: a name is not in this graph, or cannot leave the device.
    """
    chosen = _named(gm.graph, movable(gm.graph), names)
    for node in chosen:  # the partitioner could prefer to compute them again
        tag(node, CheckpointPolicy.MUST_SAVE)
    return _Move(gm.graph, split, pin).run(list(dict.fromkeys(chosen)))


class _Move:
    """Moves chosen activations of one joint graph."""

    def __init__(self, graph: fx.Graph, split: GraphSplit, pin: bool) -> None:
        self.graph, self.split, self.pin = graph, split, pin

    def run(self, chosen: list[fx.Node]) -> int:
        """Edit the graph; return how many activations move."""
        chosen = self._without_random(_merge_twins(self.graph, chosen))
        if not chosen:
            return 0
        end = self._gather_forward()
        again = self._again(chosen)
        hosts = {node: self._offload(node) for node in chosen}
        cursor = end
        while cursor.next in hosts.values():
            cursor = cursor.next
        back: dict[fx.Node, fx.Node] = {}
        for node, host in hosts.items():
            back[node] = cursor = self._reload(node, host, cursor)
        for node in list(self.graph.nodes):
            if not any(arg in back for arg in node.all_input_nodes):
                continue
            if node in again:
                with self.graph.inserting_after(cursor):
                    twin = self.graph.node_copy(node, lambda arg: back.get(arg, arg))
                twin.meta.pop("partitioner_tag", None)
                back[node] = cursor = twin
            elif node.name in self.split.backward and node.name not in self.split.forward:
                node.args = fx.node.map_arg(node.args, lambda arg: back.get(arg, arg))
                node.kwargs = fx.node.map_arg(node.kwargs, lambda arg: back.get(arg, arg))
        self._map_gradients(back)
        self._leave_to_backward({back[node] for node in chosen})
        return len(chosen)

    def _leave_to_backward(self, reloads: set[fx.Node]) -> None:
        """Tag what reads a reload: a partitioner that plans would take it for a part of forward."""
        for node in forward_nodes(self.graph):
            if node in reloads or not reloads.isdisjoint(node.all_input_nodes):
                reloads.add(node)
                tag(node, CheckpointPolicy.MUST_RECOMPUTE)

    def _map_gradients(self, back: dict[fx.Node, fx.Node]) -> None:
        """Let gradients among the graph's outputs be the nodes of backward, not those of forward."""
        outputs = outputs_of(self.graph)
        num = self.split.num_outputs
        gradients = [back.get(x, x) if isinstance(x, fx.Node) else x for x in outputs[num:]]
        self.graph.output_node().args = ([*outputs[:num], *gradients],)

    def _again(self, chosen: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
        """Return forward nodes that backward needs again, with the activations they come from.

        These are recomputed nodes, and views through which a chosen activation would be saved.
        """
        comes_from: dict[fx.Node, set[fx.Node]] = {node: {node} for node in chosen}
        owner = owners(self.graph)
        for node in self.graph.nodes:
            if node.op != "call_function" or node in comes_from:
                continue
            if node.name not in self.split.forward:
                continue
            is_view = owner.get(node) in chosen
            if node.name in self.split.backward or is_view:
                origin = set().union(*(comes_from.get(n, ()) for n in node.all_input_nodes))
                if origin:
                    comes_from[node] = origin
        return {node: origin for node, origin in comes_from.items() if node not in chosen}

    def _without_random(self, chosen: list[fx.Node]) -> list[fx.Node]:
        again = self._again(chosen)
        tied = set().union(*(origin for node, origin in again.items() if is_random(node)))
        return [node for node in chosen if node not in tied]

    def _gather_forward(self) -> fx.Node:
        """Put what runs in backward alone behind all forward nodes; return the last of those."""
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        ends = [i for i, node in enumerate(calls) if node.name in self.split.forward]
        end = cursor = calls[ends[-1]]
        for node in calls[: ends[-1]]:
            if node.name not in self.split.forward:
                cursor.append(node)
                cursor = node
        return end

    def _offload(self, node: fx.Node) -> fx.Node:
        """Copy a node to the host after its last forward use; that copy is saved."""
        users = set(readers([node]))
        uses = [n for n in self.graph.nodes if n in users and n.name in self.split.forward]
        with self.graph.inserting_after(uses[-1] if uses else node):
            host = call(self.graph, ops.offload, (node, self.pin), name=f"{node.name}_host")
        mark_host(host)
        tag(host, CheckpointPolicy.MUST_SAVE)
        return host

    def _reload(self, node: fx.Node, host: fx.Node, after: fx.Node) -> fx.Node:
        with self.graph.inserting_after(after):
            device = value_of(node).device
            back = call(self.graph, ops.reload, (host, device), name=f"{node.name}_back")
        back.meta.update(MUST_BE_IN_BACKWARD)
        return back


def _named(graph: fx.Graph, owner: dict[fx.Node, fx.Node], names: frozenset[str]) -> list[fx.Node]:
    """Return what owns the memory of the activations that a plan names, in graph order."""
    by_name = {node.name: node for node in graph.nodes}
    for name in sorted(names):
        if by_name.get(name) not in owner:
            why = "cannot leave the device" if name in by_name else "is not in this graph"
            raise ValueError(
                f"the plan offloads %{name}, which {why}: the plan was made for another graph; "
                "plan again"
            )
    return [owner[node] for node in owner if node.name in names]


def _merge_twins(graph: fx.Graph, chosen: list[fx.Node]) -> list[fx.Node]:
    """Let equal nodes be one, as the partitioner would make them later: all uses then show."""
    where = positions(graph)
    gone: set[fx.Node] = set()
    for node in chosen:
        if node in gone or is_random(node) or not node.all_input_nodes:
            continue
        for other in list(node.all_input_nodes[0].users):
            is_equal = other.target is node.target and other.args == node.args
            if is_equal and other.kwargs == node.kwargs and where[other] > where[node]:
                other.replace_all_uses_with(node, propagate_meta=False)
                graph.erase_node(other)
                gone.add(other)
    return [node for node in chosen if node not in gone]


_MARK = "torchloom_may_free"


def free_activation(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Mark what backward may free; return how many values."""
    inner = inner_owners(gm.graph)
    for node in inner:
        node.meta[_MARK] = True
    return len(inner)


def free_saved(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    min_bytes: int = 10 << 20,
    keeps_inputs: bool = False,
) -> int:
    """Free marked inputs of a backward graph after their last use; return how many.

    Args:
        gm: a lowered graph; edited in place where it is the backward one.
        ctx: tells whether it is.
        min_bytes: smaller saved activations are left to the backend.
        keeps_inputs: whether the backend's code holds its inputs until it returns.
    """
    if not (ctx.is_backward and keeps_inputs):
        return 0
    graph = gm.graph
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        storage = storage_of(node)
        if storage is not None:
            groups.setdefault(storage, []).append(node)
    where = positions(graph)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for nodes in groups.values():
        users = readers(nodes)
        if not all(node.meta.get(_MARK) for node in nodes) or graph.output_node() in users:
            continue
        if _storage_bytes(nodes[0]) >= min_bytes and users:
            last = max(users, key=where.__getitem__)
            dying.setdefault(last, []).append(nodes[0])
    for last, nodes in dying.items():
        with graph.inserting_after(last):
            call(graph, ops.free_, (nodes,))
    return sum(map(len, dying.values()))


def _storage_bytes(node: fx.Node) -> int:
    """Return the bytes that freeing a value frees: those of the tensor that it views."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    size = value.untyped_storage().nbytes()
    return size if isinstance(size, int) else nbytes(node)
