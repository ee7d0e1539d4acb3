"""Carries calls of bodies from the joint graph to code.

joint     region('a1b2', ...)         kept by tags: a body is not run again in backward
lowered   region('a1b2-93f0', ...)    the hash of the body's graphs makes it a key for caches
code      AOTAutograd's route: a module that takes a list and empties it
          Inductor's: one function in the generated code, called several times

Views of a body's operands are taken inside of the body: one node there instead of one for each call.

    before   w = view(slice(flat, 0, 0, 12), [3, 4])     region('a1b2', 0, [x, w])
    after    region('a1b2-77c0', 0, [x, flat])           the body begins with the slice and the view

A gathered weight is a view of what the collective fills, so there are two such nodes for each weight and call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import PHASE, post_grad_passes
from torchloom._torch.operators import OpOverload
from torchloom.capture.hooks import Bodies, Partition, WeaveHooks
from torchloom.capture.segments import fold_segments
from torchloom.graph import args_of, is_view_op, value_of
from torchloom.ops.regions import (
    CalledHalf,
    body_of,
    half_of_node,
    inputs_of,
    is_call_of_body,
    region,
)

Chain = tuple[fx.Node, ...]
"""Views of a value, each of the one before."""


def view_inside(gm: fx.GraphModule) -> list[fx.Node]:
    """Let calls take what their operands are views of; return the calls.

    Args:
        gm: a lowered graph; edited in place.
    """
    calls = [node for node in gm.graph.nodes if is_call_of_body(node)]
    for node in calls:
        operands = args_of(node)[2]
        half = half_of_node(node)
        chains = [_chain(each) for each in operands]
        if not any(chains):
            continue
        roots = [
            chain[0].all_input_nodes[0] if chain else each
            for chain, each in zip(chains, operands, strict=True)
        ]
        name = f"{node.args[0]}-{_digest(chains, roots)}"
        variants, key = body_of(name).variants, f"{name} {half.kind}"
        if key not in variants:
            variants[key] = _variant(half, chains, roots)
        node.args = (name, node.args[1], roots, *node.args[3:])
    if calls:
        gm.graph.eliminate_dead_code()
    return calls


def _chain(node: fx.Node) -> Chain:
    """Return the views that lead to an operand, outermost value first, none if it is no view."""
    found: list[fx.Node] = []
    while _is_plain_view(node):
        found.append(node)
        node = node.all_input_nodes[0]
    return tuple(found[::-1])


def _is_plain_view(node: fx.Node) -> bool:
    """Say whether a node is a view of its first argument and reads nothing else; `resident` is no such view."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if "as_strided" in str(node.target):  # it counts from the start of the storage
        return False
    return is_view_op(node.target) and node.all_input_nodes == [node.args[0]]


def _digest(chains: list[Chain], roots: list[fx.Node]) -> str:
    text = [
        [f"{each.target} {each.args[1:]} {dict(each.kwargs)}" for each in chain] for chain in chains
    ]
    values = [
        f"{value.dtype}{list(value.shape)}{list(value.stride())}" for value in map(value_of, roots)
    ]
    return hashlib.blake2b(f"{text} {values}".encode(), digest_size=4).hexdigest()


def _variant(half: CalledHalf, chains: list[Chain], roots: list[fx.Node]) -> fx.GraphModule:
    """Return a half that takes the roots."""
    made = copy_graph_module(half.graph_module)
    made.meta.clear()  # it is yet to be made ready for Inductor
    inputs = made.graph.find_nodes(op="placeholder")
    begin = inputs[-1].next
    for given, root, chain in zip(inputs[: len(roots)], roots, chains, strict=True):
        value, users = given, list(given.users)
        given.meta = {"val": value_of(root)}
        for link in chain:
            target: Any = link.target
            with made.graph.inserting_before(begin):
                value = made.graph.call_function(target, (value, *link.args[1:]), link.kwargs)
            value.meta = {"val": value_of(link)}
        for user in users:
            user.replace_input_with(given, value)
    made.recompile()
    return made


_IS_READY = "torchloom_post_grad"
"""Meta of a body's graph that Inductor's passes have rewritten."""


def keep_calls(joint: fx.Graph) -> None:
    """Tag what calls return as saved: each call runs once, forward."""
    for node in joint.find_nodes(op="call_function", target=region):
        for each in (node, *node.users):
            each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            each.meta["ac_graph_id"] = 0


def name_calls(graph: fx.Graph, bodies: Bodies) -> None:
    """Add to the names in calls a hash of the graphs that they run: compilers cache by the names."""
    digests: dict[str, str] = {}
    for node in graph.nodes:
        if is_call_of_body(node):
            name = str(node.args[0])
            if name not in digests:
                digests[name] = f"{name}-{bodies[name].digest()}"
            node.args = (digests[name], *node.args[1:])


def split_joint(
    joint: fx.GraphModule, joint_inputs: Any, hooks: WeaveHooks, default: Partition, **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph with calls of bodies, by the partitioner of the hooks or a default one."""
    keep_calls(joint.graph)
    forward, backward = (hooks.partition or default)(joint, joint_inputs, **settings)
    hooks.halves(forward.graph, backward.graph)
    for half in (forward, backward):
        name_calls(half.graph, hooks.bodies)
    return forward, backward


class BodyModule(nn.Module):
    """Runs a body's code: takes one list, which it empties."""

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, operands: list[Any]) -> Any:
        """Run it."""
        return self._run(operands)


def in_a_list(*operands: Any) -> list[Any]:
    """Return what a body is called with: the caller forgets its operands before the call."""
    return list(operands)


def call_boxed(
    gm: fx.GraphModule, run: Callable[[fx.GraphModule], Callable[[list[Any]], Any]]
) -> None:
    """Replace calls by modules.

    Args:
        gm: a lowered graph; edited in place.
        run: makes code of a body's graph.
    """
    graph = gm.graph
    for node in view_inside(gm):
        half = half_of_node(node)
        if not hasattr(gm, half.name):
            gm.add_module(half.name, BodyModule(run(half.graph_module)))
        with graph.inserting_before(node):
            # Two nodes: generated code drops what the first reads before it runs the second.
            operands = graph.call_function(in_a_list, inputs_of(node))
            call = graph.call_module(half.name, (operands,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    gm.recompile()


def prepare_calls(gm: fx.GraphModule, phase: Callable[[str], None]) -> None:
    """Make bodies that a graph calls ready for Inductor, which finds them when it comes to their calls.

    Args:
        gm: a lowered graph; edited in place.
        phase: told "layer" when a body is lowered, and "rest" behind that.
    """
    PHASE.set(phase)
    for node in view_inside(gm):
        half = half_of_node(node)
        if _IS_READY not in half.graph_module.meta:
            half.graph_module.meta[_IS_READY] = True
            post_grad_passes(half.graph_module, is_inference=half.kind == "inference")
    fold_segments(gm)
