"""A graph cut into pieces: at operators that stay as they are, and around layers that repeat.

    before   embed  layer.0  layer.1  layer.2  head
    after    piece  A        A        A        piece        three graphs to compile instead of five

N operators named in `splitting_ops` give 2 N + 1 pieces, of which N run as they are. Pieces are named by a
hash of what they compute, so equal ones are compiled and stored once. Changes no values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from torchloom._torch.aot import copy_graph_module
from torchloom.errors import ServeError
from torchloom.graph import overloads_of
from torchloom.graph.text import target_name
from torchloom.regions.find import find_regions, why_modes_leak
from torchloom.regions.labels import is_outside
from torchloom.serve.builder.pieces.piece import Divided, Piece, piece_of
from torchloom.serve.call.stitching import Ref, Step, Stitching

_LEAST_REPEATS = 2
_LEAST_LAYER = 8
"""Calls that a repeated part needs to be compiled by itself: less would only lose fusions."""
_ENTERS = re.compile(r"^_enter_|_increment_nesting$|_hooks_disable$")
_LEAVES = re.compile(r"^_exit_|_decrement_nesting$|_hooks_enable$")
_SETS = re.compile(r"^_?set_")


def groups_of(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node], layers: bool
) -> list[tuple[Any, list[fx.Node]]]:
    """Return runs of nodes that belong together, in order.

    Args:
        nodes: the calls of a graph, in order.
        kept: of these, operators that stay as they are.
        layers: whether layers that repeat become groups.

    Returns:
        Each group with its key: equal ones for runs that are joined.
    """
    block_of = blocks_of(nodes)
    layer_of = _layers(nodes[0].graph) if layers and nodes else {}
    for block in set(block_of.values()):
        inside = {layer_of.get(each) for each in block}
        layer = inside.pop() if len(inside) == 1 else None
        layer_of |= dict.fromkeys(block, layer)
    found: list[tuple[Any, list[fx.Node]]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        producer = node.args[0] if node.target is operator.getitem and node.args else None
        is_pick = isinstance(producer, fx.Node) and isinstance(
            producer.meta.get("example_value"), (tuple, list)
        )
        if is_pick and producer in home:
            home[producer].append(node)  # never hand a tuple from piece to piece
            home[node] = home[producer]
            continue
        key = ("kept", id(node)) if node in kept else ("layer", layer_of.get(node))
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(node)
        home[node] = found[-1][1]
    joined: list[tuple[Any, list[fx.Node]]] = []
    for key, group in found:
        is_layer = key[0] == "layer" and key[1] is not None and len(group) >= _LEAST_LAYER
        name = key if key[0] == "kept" or is_layer else "rest"
        if joined and name == "rest" and joined[-1][0] == "rest":
            joined[-1][1].extend(group)
        else:
            joined.append((name, list(group)))
    return joined


def _layers(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """Return the number of the layer that a node is a part of, for nodes of layers that repeat."""
    # Only runs of modes matter: pieces are compared anew, and may return views of one another.
    found = find_regions(graph, _LEAST_REPEATS, why_not=why_modes_leak)
    parts = [part for group in found.groups for part in group]
    return {node: number for number, part in enumerate(parts) for node in part.nodes}


def blocks_of(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the nodes from where a transform, autocast or a mode is entered to where it is left, for each of them.

    What runs between is not what it would be alone, so a graph is not cut there.
    """
    names = {n: str(target_name(n.target)) for n in nodes if n.op == "call_function"}
    at_last = {
        node.target: node.args
        for node, name in names.items()
        if _SETS.search(name) and not node.all_input_nodes
    }
    now = dict(at_last)
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    depth = 0
    block: list[fx.Node] = []
    for node in nodes:
        name = names.get(node, "")
        depth += bool(_ENTERS.search(name)) - bool(_LEAVES.search(name))
        if node.target in at_last:
            now[node.target] = node.args
        is_open = depth > 0 or now != at_last
        if is_open or block:
            block.append(node)
        if block and not is_open:
            found |= dict.fromkeys(block, tuple(block))
            block = []
    return found | dict.fromkeys(block, tuple(block))


def divide(
    graph_module: fx.GraphModule, splitting_ops: Collection[str], *, layers: bool
) -> Divided:
    """Cut a graph.

    Args:
        graph_module: from Dynamo; it is left as it is.
        splitting_ops: operators that stay as they are, like "mylib::attention" or
            "mylib::attention.default".
        layers: whether layers that repeat become pieces.

    Raises:
        ServeError: no operator of that name is called, or one returns what cannot be passed on.
    """
    graph_module = copy_graph_module(graph_module)
    _sizes_one_by_one(graph_module)
    _outside_first(graph_module.graph)
    nodes = [
        n
        for n in graph_module.graph.nodes
        if n.op in ("call_function", "call_method", "call_module")
    ]
    kept = {node for node in nodes if _is_named(node, splitting_ops)}
    _check_named(splitting_ops, kept)
    if inside := kept & blocks_of(nodes).keys():
        raise ServeError(
            f"the graph cannot be cut at {min(inside).name}: it runs within autocast, a gradient mode or a transform of "
            "torch.func, which hold for what is compiled as one. Call it outside of that block, or leave it out of "
            "splitting_ops"
        )
    groups = groups_of(nodes, kept, layers)
    if len(groups) <= 1:
        return _whole(graph_module)
    number_of = {node: number for number, (_, group) in enumerate(groups) for node in group}
    top = split_module(
        graph_module, graph_module, lambda node: number_of[node], keep_original_order=True
    )
    kept_numbers = {number_of[node] for node in kept}
    divided = _stitched(top, kept_numbers)
    blind = [piece for piece in divided.pieces if not piece.is_kept and _is_blind(piece)]
    if not blind:
        return divided
    if layers:  # a layer that is compiled as a part of the whole sees what aliases what
        return divide(graph_module, splitting_ops, layers=False)
    raise ServeError(
        "the graph cannot be cut: a piece writes to a tensor of which another piece hands it a view as well, "
        "and compilers believe that inputs do not overlap. Take the view after the operator that splits, or "
        "leave splitting_ops out"
    )


def _is_blind(piece: Piece) -> bool:
    """Say whether a piece writes, and two of its inputs share memory: its compiler would not know."""
    if not piece.writes:
        return False
    storages = [
        value.untyped_storage()._cdata for value in piece.inputs if isinstance(value, torch.Tensor)
    ]
    return len(set(storages)) < len(storages)


def _is_named(node: fx.Node, names: Collection[str]) -> bool:
    return any(
        each._schema.name in names or f"{each._schema.name}.{each._overloadname}" in names
        for each in overloads_of(node.target)
    )


def _check_named(names: Collection[str], kept: Iterable[fx.Node]) -> None:
    seen = {each._schema.name for node in kept for each in overloads_of(node.target)}
    missing = [name for name in names if name.partition(".")[0] not in seen]
    if missing:
        raise ServeError(
            f"splitting_ops names {', '.join(map(repr, missing))}, which the model does not call: use "
            "names like 'mylib::attention' of operators that appear in its graph"
        )


def _whole(graph_module: fx.GraphModule) -> Divided:
    """Return a graph that is one piece."""
    piece = piece_of(graph_module, is_kept=False)
    num = len(piece.inputs)
    outputs: Any = graph_module.graph.output_node().args[0]
    slots = tuple(range(num, num + len(outputs)))
    step = Step(0, tuple(Ref(slot) for slot in range(num)), slots)
    return Divided((piece,), Stitching(num, (step,), tuple(Ref(slot) for slot in slots)))


def _stitched(top: fx.GraphModule, kept_numbers: Collection[int]) -> Divided:
    pieces: dict[str, Piece] = {}
    order: list[str] = []
    slot_of: dict[fx.Node, Any] = {}
    steps: list[Step] = []
    next_slot = 0
    for node in top.graph.nodes:
        if node.op == "placeholder":
            slot_of[node] = next_slot
            next_slot += 1
    num_inputs = next_slot
    results: tuple[Ref, ...] = ()
    for node in top.graph.nodes:
        if node.op == "call_module":
            module = getattr(top, node.target)
            is_tuple = _returns_tuple(module)
            number = int(node.target.rpartition("_")[2])
            piece = piece_of(module, is_kept=number in kept_numbers)
            if piece.digest not in pieces:
                pieces[piece.digest] = piece
                order.append(piece.digest)
            outputs = module.graph.output_node().args[0]
            slots = tuple(range(next_slot, next_slot + len(outputs)))
            next_slot += len(outputs)
            args = tuple(_ref(arg, slot_of) for arg in node.args)
            steps.append(Step(order.index(piece.digest), args, slots))
            slot_of[node] = slots if is_tuple else slots[0]
        elif node.op == "call_function" and node.target is operator.getitem:
            slot_of[node] = slot_of[node.args[0]][node.args[1]]
        elif node.op == "output":
            results = tuple(_ref(each, slot_of) for each in node.args[0])
        elif node.op != "placeholder":
            raise ServeError(
                f"the graph cannot be cut: {node.op} {node.target} lies between two pieces; leave "
                "splitting_ops out"
            )
    return Divided(
        tuple(pieces[digest] for digest in order), Stitching(num_inputs, tuple(steps), results)
    )


def _ref(value: Any, slot_of: dict[fx.Node, Any]) -> Ref:
    if isinstance(value, fx.Node):
        slot = slot_of[value]
        if isinstance(slot, tuple):
            raise ServeError(f"the graph cannot be cut: {value.name} is a tuple between two pieces")
        return Ref(slot)
    return Ref(None, value)


def _returns_tuple(module: fx.GraphModule) -> bool:
    """Let a piece return a tuple; say whether it did already."""
    output = module.graph.output_node()
    returned = output.args[0]
    if isinstance(returned, (tuple, list)):
        return True
    if returned is None:  # an operator that only writes
        output.args = ((),)
        return True
    output.args = ((returned,),)
    module.recompile()
    return False


def _outside_first(graph: fx.Graph) -> None:
    """Move sizes that no layer computes to the front, where they do not come between two nodes of a layer."""
    last = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "placeholder":
            last = node
        elif node.op != "output" and is_outside(node):
            last.append(node)
            last = node


def _sizes_one_by_one(graph_module: fx.GraphModule) -> None:
    """Replace `x.size()` by its numbers, which can be handed on from piece to piece."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_method", target="size"):
        if len(node.args) > 1 or node.kwargs:
            continue
        source = node.args[0]
        shape = node.meta["example_value"]
        with graph.inserting_before(node):
            sizes = []
            for dim, size in enumerate(shape):
                made = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
                made.meta = {**node.meta, "example_value": size}
                sizes.append(made)
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                user.replace_all_uses_with(sizes[user.args[1]])
                graph.erase_node(user)
            else:
                user.args = fx.map_arg(
                    user.args,
                    lambda arg, node=node, sizes=sizes: tuple(sizes) if arg is node else arg,
                )
        if not node.users:
            graph.erase_node(node)
    graph_module.recompile()
