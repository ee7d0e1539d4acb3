"""Rewrite a captured graph so that equal layers look equal and can be called.

Identity operators go, since a region must not return its own input. `to` and its like return their own tensor or a
copy, never a view; autograd records nothing of the first:

    before   h = x.to(torch.float32); pow(h); norm(h); add(x, ..)        x is of float32
    after    pow(x); norm(x); add(x, ..)

Numbers that are no sizes are computed where they are read, since calls of bodies take sizes alone:

    before   scale = T ** -0.5; a = h1 * scale; b = h2 * scale
    after    a = h1 * (T ** -0.5); b = h2 * (T ** -0.5)

Gathers leave the user's checkpoints, as any other part of a graph:

    before   checkpoint(body, x, shard)        body: w = gather(shard, 'layers.0.weight'); ...
    after    w = gather(shard, 'layers.0.weight')
             checkpoint(body', x, w)           body': equal for all layers

Stage 3 gathers weights again in backward whether a checkpoint holds them or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import CHECKPOINT
from torchloom._torch.modes import storage_id
from torchloom.regions.labels import PARAMETER_OPS, module_of_attr, traced_value, value_text

_METHODS = frozenset(
    ["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "cpu", "cuda"]
)


def drop_identities(graph: fx.Graph) -> None:
    """Let all that reads such a result read the tensor itself.

    Args:
        graph: a copy of one from Dynamo; edited in place.
    """
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in _METHODS:
            continue
        given = node.args[0] if node.args else None
        if isinstance(given, fx.Node) and _is_same(traced_value(given), traced_value(node)):
            node.replace_all_uses_with(given, propagate_meta=False)
            graph.erase_node(node)


def _is_same(given: object, result: object) -> bool:
    if not isinstance(given, Tensor) or not isinstance(result, Tensor):
        return False
    storage = storage_id(given)
    return (
        storage is not None
        and storage == storage_id(result)
        and value_text(given) == value_text(result)
        and str(given.storage_offset()) == str(result.storage_offset())
    )


_NUMBERS = (float, bool, torch.SymFloat, torch.SymBool)
_SIZES = (int, torch.SymInt, torch.Size)


def compute_where_read(graph: fx.Graph) -> None:
    """Give each reader of such a number its own, and leave out numbers and sizes that nobody reads.

    Where Dynamo has found a size to be one number, its readers hold that number: what computed it, which stands in the
    first layer alone, stays behind.

    Args:
        graph: a copy of one from Dynamo; edited in place.
    """
    for node in reversed(list(graph.nodes)):
        if _is_number(node, _NUMBERS):
            for user in list(node.users):
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
        is_size = node.op == "call_method" and node.target == "size"
        if not node.users and (is_size or _is_number(node, (*_NUMBERS, *_SIZES))):
            graph.erase_node(node)


def _is_number(node: fx.Node, kinds: tuple[type, ...]) -> bool:
    """Say whether a node computes such a number from numbers, which is the same wherever it is done."""
    if node.op != "call_function" or not isinstance(traced_value(node), kinds):
        return False
    given = [traced_value(each) for each in node.all_input_nodes]
    return all(isinstance(each, (*_NUMBERS, *_SIZES)) for each in given)


def hoist_gathers(gm: fx.GraphModule) -> None:
    """Move gathers out of checkpoints; policies that say what these keep have no say about weights.

    Args:
        gm: a copy of a captured graph; its checkpointed bodies are replaced, not changed.
    """
    for node in list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT)):
        body = module_of_attr(_attr(node))
        if isinstance(body, fx.GraphModule):
            copy = copy_graph_module(body)
            inputs = copy.graph.find_nodes(op="placeholder")
            _hoist(gm, node, copy, dict(zip(inputs, node.args[1:], strict=True)))


def _hoist(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, given: dict[fx.Node, Any]
) -> None:
    graph, inputs = body.graph, list(given)
    moved = [
        each
        for each in graph.nodes
        if each.target in PARAMETER_OPS and all(used in given for used in each.all_input_nodes)
    ]
    if not moved:
        return
    end = next(each for each in graph.nodes if each.op != "placeholder")
    for each in moved:
        with gm.graph.inserting_before(node):
            outside = gm.graph.node_copy(each, lambda used: given[used])
        with graph.inserting_before(end if end is not each else each):
            inside = graph.placeholder(f"{each.name}_given")
        inside.target = inside.name
        inside.meta = {"example_value": traced_value(each)}
        given[inside] = outside
        each.replace_all_uses_with(inside, propagate_meta=False)
        if each is end:
            end = each.next
        graph.erase_node(each)
    for each in inputs:
        if not each.users:
            del given[each]
            graph.erase_node(each)
    _replace_body(gm, node, body, given)


def _replace_body(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, given: Mapping[fx.Node, Any]
) -> None:
    """Let a checkpoint run another body, whose own name keeps it from those of other checkpoints.

    Args:
        gm: the graph's module; edited in place.
        node: the checkpoint.
        body: what it is to run.
        given: by the inputs of the body, in their order.
    """
    attr = _attr(node)
    name = f"{attr.target}_of_{node.name}".replace(".", "_")
    body.recompile()
    gm.add_module(name, body)
    with gm.graph.inserting_before(node):
        new_attr = gm.graph.get_attr(name)
    node.args = (new_attr, *given.values())
    if not attr.users:
        gm.graph.erase_node(attr)


def _attr(checkpoint: fx.Node) -> fx.Node:
    attr: Any = checkpoint.args[0]
    return attr
