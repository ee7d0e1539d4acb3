"""Find the forward half of a joint graph, and what of it backward could compute again or read from the host."""

from __future__ import annotations

import torch
from torch import fx

from torchloom._torch.operators import OpOverload
from torchloom.graph.alias import is_view, owners, source_of
from torchloom.graph.nodes import tensors_in, value_of


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
    owner = owners(graph)
    ends = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    fixed = {owner[node] for node in ends if node in owner}
    plain = {node: node not in fixed and _is_plain(node) for node in set(owner.values())}
    return {node: root for node, root in owner.items() if plain[root]}


def _is_plain(node: fx.Node) -> bool:
    """Say whether a node is a floating-point tensor of known shape that fills its storage."""
    value = value_of(node)
    is_ours = getattr(node.target, "namespace", "") == "torchloom"
    if node.op != "call_function" or is_ours or value is None or not value.is_floating_point():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes) or value.numel() == 0:
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _holds_tensor(value: object) -> bool:
    return any(True for _ in tensors_in(value))
