"""Calls of bodies, from the joint graph to code.

joint     region('a1b2', ...)         kept by tags: a body is not run again in backward
lowered   region('a1b2-93f0', ...)    the hash of the body's graphs makes it a key for caches
code      AOTAutograd's route: a module that takes a list and empties it
          Inductor's: one function in the generated code, called several times
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch.bodies import PHASE, lower_calls, post_grad_passes
from torchloom.capture.hooks import Bodies, Partition, WeaveHooks
from torchloom.capture.inner_views import view_inside
from torchloom.ops.regions import half_of_call, half_of_node, inputs_of, is_call_of_body, region

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
        lower_calls(node.target, functools.partial(_named_half, node.target))
        half = half_of_node(node)
        if _IS_READY not in half.graph_module.meta:
            half.graph_module.meta[_IS_READY] = True
            post_grad_passes(half.graph_module, is_inference=half.kind == "inference")


def _named_half(
    op: Any, name: str, call: int, operands: Any, sizes: Any, trains: bool = False
) -> tuple[str, fx.GraphModule]:
    half = half_of_call(op, name, trains)
    return half.name, half.graph_module
