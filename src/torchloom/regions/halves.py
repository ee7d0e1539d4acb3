"""The two halves of a body, made so that calls hand over as little as possible.

A partitioner lets forward return whatever backward reads. Of a body, operands need not be returned, as the
graph that calls it holds them: gathered weights among them are gathered again. A view need not be returned
either: backward views the tensor that it is a view of. Where a result is itself a view of what backward reads, as
the values of attention that transformers' models return are, backward takes the result and undoes its views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import TracedPart
from torchloom._torch.shapes import append_size
from torchloom.errors import RegionError
from torchloom.graph import args_of, is_view_op, value_of
from torchloom.graph.alias import storage_of
from torchloom.ops.match import with_views
from torchloom.regions.undoing import form_of, is_undone, undone

SplitBody = Callable[
    [fx.GraphModule, TracedPart, frozenset[str]], tuple[fx.GraphModule, fx.GraphModule]
]
"""`(joint graph, which it may change, what it is of, values to compute again) -> forward and backward`"""


@dataclass(frozen=True)
class Halves:
    """Forward and backward of a body as plain functions.

    forward:   operands, sizes -> results, saved values
    backward:  kept operands, kept results, saved values, gradients of results, sizes -> gradients of operands
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept_operands: tuple[int, ...]
    kept_results: tuple[int, ...]
    differentiated: tuple[int, ...]
    """Operands that have a gradient."""
    tangents: tuple[Tensor | None, ...]
    """For each result its gradient, None where it has none."""
    kept_text: str
    """Names of all that backward reads of forward: equal for equal halves of one joint graph."""


def split_body(
    traced: TracedPart, split: SplitBody, weights: frozenset[int], names: frozenset[str]
) -> Halves:
    """Split the joint graph of a body, which stays as it is.

    Args:
        traced: with its backward.
        split: a partitioner.
        weights: operands of which backward computes views and casts again.
        names: values of forward that backward computes again.

    Raises:
        RegionError: the halves need more than operands and tensors, e.g. states of generators.
    """
    joint = copy_graph_module(traced.graph_module)
    operands = [n for n in joint.graph.find_nodes(op="placeholder") if not _is_tangent(n)]
    for index in weights:
        for link in with_views(operands[index])[1:]:
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            link.meta["ac_graph_id"] = 0
    grads = args_of(joint.graph.output_node())[0][traced.num_results :]
    differentiated = tuple(i for i, grad in enumerate(grads) if isinstance(grad, fx.Node))
    forward, backward = split(joint, traced, names)
    if len(forward.graph.find_nodes(op="placeholder")) != len(operands):
        raise RegionError("its forward takes more than its operands")
    tangents = _tangents(traced, backward.graph)
    kept = _kept(forward.graph, traced.num_results)
    backward = fx.GraphModule(backward, _rewired(backward.graph, kept))
    output = forward.graph.output_node()
    output.args = (kept.values,)
    output.meta.pop("desc", None)  # AOTAutograd's names of what was returned before
    forward.graph.eliminate_dead_code()
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()
    return Halves(
        forward=forward,
        backward=backward,
        kept_operands=tuple(kept.operands),
        kept_results=tuple(kept.results),
        differentiated=differentiated,
        tangents=tangents,
        kept_text=" ".join(sorted(node.name for node in kept.roots)),
    )


def _is_tangent(node: fx.Node) -> bool:
    return node.name.startswith("tangents")


def _tangents(traced: TracedPart, backward: fx.Graph) -> tuple[Tensor | None, ...]:
    given = [value_of(n) for n in backward.find_nodes(op="placeholder") if _is_tangent(n)]
    if len(given) != sum(traced.has_tangent):
        raise RegionError("torch takes other gradients than those of its results")
    left = iter(given)
    return tuple(next(left) if has else None for has in traced.has_tangent)


@dataclass(frozen=True)
class _Kept:
    """What backward reads: nodes of the forward graph, each the root of what it was to return."""

    roots: dict[fx.Node, fx.Node]
    """What forward was to return for backward, in this order, and the value that each is a view of."""
    results: list[int]
    operands: list[int]
    nodes: list[fx.Node]
    """All of it, in the order in which backward takes it."""
    values: list[fx.Node]
    """What forward returns: its results, then what it computed for backward alone."""
    sizes: list[fx.Node]
    """Inputs of forward that are numbers."""
    shown: dict[fx.Node, fx.Node]
    """What backward reads and a result shows whole: the result."""


def _kept(forward: fx.Graph, num_results: int) -> _Kept:
    values: Any = forward.output_node().args[0]
    results, saved = list(values[:num_results]), list(values[num_results:])
    operands = forward.find_nodes(op="placeholder")
    roots = {node: _root(node) for node in saved}
    # Sizes are given to backward as they are to forward, and computed from these again.
    wanted = {node for node in roots.values() if isinstance(value_of(node), Tensor)}
    shown = {root: each for each in results if (root := _root(each)) in wanted and root is not each}
    shown = {root: each for root, each in shown.items() if is_undone(each, root)}
    known = {*operands, *results, *shown}
    computed = [n for n in forward.nodes if n in wanted and n not in known]
    kept_operands = [i for i, node in enumerate(operands) if node in wanted]
    given = {*wanted, *shown.values()}
    kept_results = [i for i, node in enumerate(results) if node in given]
    nodes = [operands[i] for i in kept_operands] + [results[i] for i in kept_results] + computed
    sizes = [node for node in operands if not isinstance(value_of(node), Tensor)]
    _check_memory(operands, [*results, *computed])
    return _Kept(roots, kept_results, kept_operands, nodes, [*results, *computed], sizes, shown)


def _root(node: fx.Node) -> fx.Node:
    """Return the value that a node views, through all views; the node itself unless it is one."""
    while (seen := _seen(node)) is not None:
        node = seen
    return node


def _seen(node: fx.Node) -> fx.Node | None:
    """Return whose memory a node shows, None if its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if node.target is operator.getitem:
        maker = node.all_input_nodes[0]
        return maker if is_view_op(maker.target) else None
    if is_view_op(node.target):
        return node.all_input_nodes[0]
    storage = storage_of(node)
    shared = [each for each in node.all_input_nodes if storage_of(each) == storage]
    return shared[0] if storage is not None and shared else None


def storage_problem(graph: fx.Graph) -> str | None:
    """Return why operands cannot be taken by their values alone, None if they can.

    `as_strided` reads the storage behind a tensor: of an operand that is a view, elements beside the view.
    """
    for node in graph.nodes:
        if "as_strided" in str(node.target) and _root(node).op == "placeholder":
            return "it reads the storage behind an operand"
    return None


def _check_memory(operands: Sequence[fx.Node], values: Sequence[fx.Node]) -> None:
    """Refuse values that share memory: whoever calls the body takes each for one of its own."""
    seen = {storage_of(node): node for node in operands if storage_of(node) is not None}
    for node in values:
        storage = storage_of(node)
        if storage is None:
            raise RegionError(f"%{node.name}, which it returns, is no plain tensor")
        if storage in seen:
            raise RegionError(
                f"%{node.name}, which it returns, shares memory with %{seen[storage].name}"
            )
        seen[storage] = node


def _rewired(backward: fx.Graph, kept: _Kept) -> fx.Graph:
    """Return backward with what is kept and the gradients as its inputs, in this order."""
    graph = fx.Graph()
    given: dict[fx.Node, fx.Node] = {}
    for node in kept.nodes:
        given[node] = graph.placeholder(node.name)
        given[node].meta = dict(node.meta)
    env: dict[fx.Node, fx.Node] = {}
    inputs = backward.find_nodes(op="placeholder")
    for old in filter(_is_tangent, inputs):
        env[old] = graph.node_copy(old)
    for node in kept.sizes:
        given[node] = graph.placeholder(node.name)
        given[node].meta = dict(node.meta)
    for root, result in kept.shown.items():  # behind all placeholders
        given[root] = undone(
            graph, result, root, given[result], lambda size: _size(graph, size, given)
        )
    saved = [each for each in inputs if not _is_tangent(each)]
    for of_kind in (True, False):  # AOTAutograd hands sizes over apart from tensors
        taken = [each for each in saved if isinstance(value_of(each), Tensor) == of_kind]
        returned = [each for each in kept.roots if isinstance(value_of(each), Tensor) == of_kind]
        if [form_of(each) for each in taken] != [form_of(each) for each in returned]:
            raise RegionError("its backward takes other values than its forward returns")
        for old, node in zip(taken, returned, strict=True):
            env[old] = _viewed_again(graph, node, given)
    for old in backward.nodes:
        if old.op == "output":
            grads = [env[each] for each in args_of(old)[0] if isinstance(each, fx.Node)]
            graph.output(grads)
        elif old.op != "placeholder":
            env[old] = graph.node_copy(old, lambda used: env[used])
    return graph


def _viewed_again(graph: fx.Graph, node: fx.Node, given: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a value in backward: given, or viewed again from what is given."""
    if node not in given:
        value = value_of(node)
        is_computed = not isinstance(value, Tensor) and node.op == "call_function"
        if _seen(node) is None and not is_computed:
            raise RegionError(f"its backward views %{node.name}, which is not kept")
        if isinstance(value, torch.SymInt):  # it may be of a tensor that backward does not get
            given[node] = _size(graph, value, given)
        else:
            given[node] = graph.node_copy(node, lambda used: _viewed_again(graph, used, given))
    return given[node]


def _size(graph: fx.Graph, size: torch.SymInt, given: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return what has a size in backward."""
    symbols = {
        str(value_of(each)): new
        for each, new in given.items()
        if new.op == "placeholder" and isinstance(value_of(each), torch.SymInt)
    }
    node = append_size(graph, size, symbols)
    if node is None:
        raise RegionError(f"its backward reads a size that is not given: {size}")
    return node
