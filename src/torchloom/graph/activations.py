"""Find the halves of a joint graph: what runs forward, what backward could compute again, what is saved between.

A trial of the partitioner tells what will be saved, so a joint pass can act on what will really be kept instead
of guessing; the joint graph itself stays as it is. `live_bytes` is a first look at what is alive when, without aliases
or reuse: views count as nothing of their own, because they share what they view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchloom._torch.aot import trial_partition
from torchloom._torch.operators import OpOverload
from torchloom.graph.alias import is_view, owners, source_of, viewed
from torchloom.graph.nodes import is_on_host, nbytes, tensors_in, value_of


def forward_nodes(joint: fx.Graph) -> list[fx.Node]:
    """Return the calls of a joint graph that forward makes, in order.

    None of them depends on a gradient. Calls traced after the first one that does belong to backward,
    even without a gradient among their inputs (the derivative of an activation, say), because forward
    does not need them. Sizes of symbolic shapes, and calls that read an input which forward writes,
    stay in forward.
    """
    after_tangents: set[fx.Node] = set()
    written: set[fx.Node] | None = None
    found = []
    in_backward = False
    for node in joint.nodes:
        if node.op == "placeholder":
            if node.name.startswith("tangents"):
                after_tangents.add(node)
        elif any(used in after_tangents for used in node.all_input_nodes):
            after_tangents.add(node)
            in_backward = True
        elif node.op == "call_function":
            if in_backward and _holds_tensor(value_of(node)):
                written = mutated_inputs(joint) if written is None else written
                if not any(source_of(used) in written for used in node.all_input_nodes):
                    continue
            found.append(node)
    return found


def droppable(joint: fx.Graph) -> set[fx.Node]:
    """Return the calls of the forward half whose results need not wait for backward.

    Excluded are views (they are dropped with the tensor that they view), results of the graph (the caller
    holds them), calls that must not run twice, and calls that read an input which forward writes.
    """
    half = forward_nodes(joint)
    half_set = set(half)
    written = mutated_inputs(joint)
    results = {source_of(node) for node in joint.output_node().all_input_nodes if node in half_set}
    return {
        node
        for node in half
        if not is_view(node)
        and may_recompute(node)
        and node not in results
        and not any(source_of(used) in written for used in node.all_input_nodes)
    }


def mutated_inputs(joint: fx.Graph) -> set[fx.Node]:
    """Return the inputs that forward writes: buffers such as running means.

    Backward sees the written values, so a call that reads such an input cannot be computed again. The
    function finds them by AOTAutograd's descriptors of outputs, or by a copy into them.
    """
    output = joint.output_node()
    described = output.meta.get("desc") or ()
    written = [getattr(each, "mutated_input", None) for each in described]
    found = {
        node
        for node in joint.find_nodes(op="placeholder")
        if node.meta.get("desc") is not None and node.meta["desc"] in written
    }
    for node in joint.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target = node.args[0]
        if isinstance(target, fx.Node) and source_of(target).op == "placeholder":
            found.add(source_of(target))
    return found


def may_recompute(node: fx.Node) -> bool:
    """Say whether computing a value twice gives the same value twice and has no other effect.

    Random operators would draw again; communication would have to happen on all ranks; what writes
    its arguments would write twice.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return not (draws(node) or target._schema.is_mutable) and _holds_tensor(value_of(node))


def draws(node: fx.Node) -> bool:
    """Say whether a node draws random numbers. Attention does so for dropout alone."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    if place < len(node.args):
        return bool(node.args[place] != 0)
    return bool(node.kwargs.get("dropout_p", 0.0) != 0)


def movable(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return each node whose memory may be moved, with the node that owns that memory.

    The owner is what moves: a view that is kept keeps all that it views. Not movable are other than
    floating-point tensors, symbolic and empty shapes, results of torchloom's own operators, and
    whatever shares memory with a graph input or output: parameters, the loss.
    """
    owner = inner_owners(graph)
    plain = {node: _is_plain(node) for node in set(owner.values())}
    return {node: root for node, root in owner.items() if plain[root]}


def inner_owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return each node that shares no memory with an input or a result, with the node that owns its memory.

    Owners are calls, and not of torchloom's own operators.
    """
    owner = owners(graph)
    ends = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    fixed = {owner[node] for node in ends if node in owner}
    return {
        node: root
        for node, root in owner.items()
        if root not in fixed and root.op == "call_function"
        if getattr(root.target, "namespace", "") != "torchloom"
    }


def _is_plain(node: fx.Node) -> bool:
    """Say whether a node is a floating-point tensor of known shape that fills its storage."""
    value = value_of(node)
    if value is None or not value.is_floating_point():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes) or value.numel() == 0:
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _holds_tensor(value: object) -> bool:
    return any(True for _ in tensors_in(value))


def live_bytes(graph: fx.Graph) -> tuple[int, ...]:
    """Return the bytes alive after each node: inputs from the start, results until their last use."""
    nodes = list(graph.nodes)
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        last_use.setdefault(node, index)
        for used in node.all_input_nodes:
            owner: fx.Node | None = used
            while owner is not None:  # who reads a view keeps what it views
                last_use[owner] = index
                owner = viewed(owner)
    dies: dict[int, int] = {}
    alive, curve = 0, []
    for index, node in enumerate(nodes):
        if node.op != "output" and viewed(node) is None:
            size = 0 if is_on_host(node) else nbytes(node)
            alive += size
            dies[last_use[node]] = dies.get(last_use[node], 0) + size
        alive -= dies.pop(index, 0)
        curve.append(alive)
    return tuple(curve)


@dataclass(frozen=True)
class GraphSplit:
    """Nodes of a joint graph by where they will run; names, because graphs are copied."""

    forward: frozenset[str]
    """Computed in the forward graph."""
    backward: frozenset[str]
    """Computed in the backward graph: again, if they are in `forward` as well."""
    saved: frozenset[str]
    """Handed from one to the other, graph inputs included."""
    num_outputs: int
    """The first outputs of the joint graph are the forward's, the others are gradients."""


def split_of(joint: fx.GraphModule) -> GraphSplit | None:
    """Return how min-cut would divide a joint graph; None for a graph without a backward half."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    if not any(node.name.startswith("tangents") for node in placeholders):
        return None
    num_grads = sum(node.name.startswith("primals") for node in placeholders)
    num_outputs = len(outputs_of(joint.graph)) - num_grads
    return split_between(*trial_partition(joint, num_outputs), num_outputs)


def split_between(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> GraphSplit:
    """Return how two graphs divide the joint graph that they were made of.

    Args:
        forward: one of the two.
        backward: the other one.
        num_outputs: how many of the joint graph's outputs are forward's.
    """
    inputs = (node.name for node in backward.find_nodes(op="placeholder"))
    return GraphSplit(
        forward=_computed(forward),
        backward=_computed(backward),
        saved=frozenset(name for name in inputs if not name.startswith("tangents")),
        num_outputs=num_outputs,
    )


def _computed(graph: fx.Graph) -> frozenset[str]:
    return frozenset(node.name for node in graph.nodes if node.op == "call_function")


def outputs_of(graph: fx.Graph) -> list[Any]:
    """Return what a captured graph returns, a flat list of nodes and constants."""
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    return list(values)
