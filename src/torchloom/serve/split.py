"""A graph cut into pieces: at operators that stay as they are, and around layers that repeat.

    before   embed  layer.0  layer.1  layer.2  head
    after    piece  A        A        A        piece        three graphs to compile instead of five

N operators named in `splitting_ops` give 2 N + 1 pieces, of which N run as they are. Pieces are named by a
hash of what they compute, so equal ones are compiled and stored once. Changes no values.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from torchloom._torch.operators import OpOverload, OpOverloadPacket
from torchloom.errors import ServeError
from torchloom.graph.text import target_name
from torchloom.serve.digest import digest_of, target_text, typed
from torchloom.serve.stitch import Ref, Step, Stitching

_LEAST_LAYER = 8
"""Calls that a repeated part needs to be compiled by itself: less would only lose fusions."""
_INDEX = re.compile(r"(?:\.|\[')(\d+)(?:'\])?(?=$|\.|\[|')")


@dataclass(frozen=True)
class Piece:
    """A part of a graph."""

    graph_module: fx.GraphModule
    """Returns a tuple."""
    inputs: tuple[Any, ...]
    """Fake tensors and sizes."""
    is_kept: bool
    """Whether it is one of the operators that stay as they are."""
    digest: str
    """A hash of what it computes, whatever its nodes are called."""
    fixed: frozenset[int] = frozenset()
    """Places of inputs that are the model's own tensors, whose memory stays where it is."""

    @property
    def writes(self) -> bool:
        """Whether it may write to tensors."""
        return any(map(may_write, self.graph_module.graph.nodes))

    @property
    def written(self) -> frozenset[int]:
        """Places of inputs that it may write to, by itself or through views."""
        storages = [
            value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
            for value in self.inputs
        ]
        tensors = {place for place, storage in enumerate(storages) if storage is not None}
        found: set[int] = set()
        for node in filter(may_write, self.graph_module.graph.nodes):
            values = [each.meta.get("example_value") for each in _targets(node)]
            if any(value is None for value in values):
                return frozenset(tensors)
            known = {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
            found |= {place for place in tensors if storages[place] in known}
        return frozenset(found)


@dataclass(frozen=True)
class Divided:
    """A graph in pieces."""

    pieces: tuple[Piece, ...]
    """In order of first use, equal ones once."""
    stitching: Stitching

    @property
    def writes(self) -> bool:
        """Whether it may write to tensors that it is given."""
        return any(piece.writes for piece in self.pieces)

    @property
    def num_calls(self) -> int:
        """Return how many pieces run in a call."""
        return len(self.stitching.steps)


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
    graph_module = copied(graph_module)
    _sizes_one_by_one(graph_module)
    nodes = [
        n
        for n in graph_module.graph.nodes
        if n.op in ("call_function", "call_method", "call_module")
    ]
    kept = {node for node in nodes if _is_named(node, splitting_ops)}
    _check_named(splitting_ops, kept)
    groups = _groups(nodes, kept, layers)
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


def _overloads(target: Any) -> list[OpOverload]:
    """Return the operator that a node calls, or all that a name like `torch.ops.mylib.attention` stands for."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, OpOverload) else []


def may_write(node: fx.Node) -> bool:
    """Say whether a node may write to its arguments."""
    return bool(_targets(node))


def _targets(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node may write to."""
    if node.op == "call_method":
        name = str(node.target)
        return _nodes(node.args[:1]) if name.endswith("_") and not name.endswith("__") else []
    if node.op != "call_function":
        return []
    if operators := _overloads(node.target):
        written = {
            name
            for each in operators
            for place, argument in enumerate(each._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for name in (argument.name, place)
        }
        given = {**dict(enumerate(node.args)), **node.kwargs}
        return _nodes([value for name, value in given.items() if name in written])
    name = target_name(node.target)
    out = _nodes([node.kwargs.get("out")])
    is_in_place = name in ("setitem", "iadd", "isub", "imul", "itruediv") or name.endswith("_")
    if is_in_place or node.kwargs.get("inplace"):
        return [*out, *_nodes([*node.args[:1], node.kwargs.get("input")])]
    return out


def _nodes(values: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments."""
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def _groups(
    nodes: Sequence[fx.Node], kept: Collection[fx.Node], layers: bool
) -> list[tuple[Any, list[fx.Node]]]:
    """Return runs of nodes that belong together, in order."""
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
        key = ("kept", id(node)) if node in kept else ("layer", _layer(node) if layers else None)
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(node)
        home[node] = found[-1][1]
    signatures = Counter(_signature(group) for key, group in found if key[0] == "layer")
    joined: list[tuple[Any, list[fx.Node]]] = []
    for key, group in found:
        is_layer = (
            key[0] == "layer"
            and key[1] is not None
            and len(group) >= _LEAST_LAYER
            and signatures[_signature(group)] > 1
        )
        name = key if key[0] == "kept" or is_layer else "rest"
        if joined and name == "rest" and joined[-1][0] == "rest":
            joined[-1][1].extend(group)
        else:
            joined.append((name, list(group)))
    return joined


def _layer(node: fx.Node) -> str | None:
    """Return the outermost numbered module that a node was traced in, like "layers.3"."""
    for path, _ in reversed(list(node.meta.get("nn_module_stack", {}).values())):
        if found := _INDEX.search(str(path)):
            outermost = str(path)[: found.end()]
            for outer, _ in node.meta["nn_module_stack"].values():
                if earlier := _INDEX.search(str(outer)):
                    return str(outer)[: earlier.end()]
            return outermost
    return None


def _signature(group: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(f"{target_text(node)} {typed(node.meta.get('example_value'))}" for node in group)


def _is_named(node: fx.Node, names: Collection[str]) -> bool:
    return any(
        each._schema.name in names or f"{each._schema.name}.{each._overloadname}" in names
        for each in _overloads(node.target)
    )


def _check_named(names: Collection[str], kept: Iterable[fx.Node]) -> None:
    seen = {each._schema.name for node in kept for each in _overloads(node.target)}
    missing = [name for name in names if name.partition(".")[0] not in seen]
    if missing:
        raise ServeError(
            f"splitting_ops names {', '.join(map(repr, missing))}, which the model does not call: use "
            "names like 'mylib::attention' of operators that appear in its graph"
        )


def _whole(graph_module: fx.GraphModule) -> Divided:
    """Return a graph that is one piece."""
    piece = _piece(graph_module, is_kept=False)
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
            piece = _piece(module, is_kept=number in kept_numbers)
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


def _piece(module: fx.GraphModule, *, is_kept: bool) -> Piece:
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = tuple(node.meta["example_value"] for node in placeholders)
    fixed = {place for place, node in enumerate(placeholders) if node.name.startswith("l_self_")}
    return Piece(module, inputs, is_kept, digest_of(module), frozenset(fixed))


def copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a module of the same graph, whose nodes can be changed."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    made = fx.GraphModule(graph_module, graph)
    made.meta = dict(graph_module.meta)
    return made


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
