"""Calls of bodies, from the joint graph to code.

joint     region('a1b2', ...)         kept by tags: a body is not run again in backward
lowered   region('a1b2-93f0', ...)    the hash of the body's graphs makes it a key for caches
code      AOTAutograd's route: a module that takes a list and empties it
          Inductor's: one function in the generated code, called several times
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch.bodies import lower_calls, post_grad_passes
from torchloom.capture.hooks import Bodies, Partition, WeaveHooks
from torchloom.ops.regions import (
    body_of,
    half_of_call,
    is_call_of_body,
    region,
    region_backward,
)

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
    for node in [each for each in graph.nodes if is_call_of_body(each)]:
        name, kind = half_of_call(node)
        attr = f"body_{name.replace('-', '_')}_{kind}"
        if not hasattr(gm, attr):
            gm.add_module(attr, BodyModule(run(body_of(name).half(kind))))
        with graph.inserting_before(node):
            # Two nodes: generated code drops what the first reads before it runs the second.
            operands = graph.call_function(in_a_list, tuple(node.args[2]))  # type: ignore[arg-type]
            call = graph.call_module(attr, (operands,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    gm.recompile()


def prepare_calls(gm: fx.GraphModule) -> None:
    """Make bodies that a graph calls ready for Inductor, which finds them when it comes to their calls."""
    calls = [node for node in gm.graph.nodes if is_call_of_body(node)]
    if not calls:
        return
    lower_calls(region, _graph_of_region)
    lower_calls(region_backward, _graph_of_region_backward)
    for node in calls:
        name, kind = half_of_call(node)
        half = body_of(name).half(kind)
        if _IS_READY not in half.meta:
            half.meta[_IS_READY] = True
            post_grad_passes(half, is_inference=kind == "inference")


def _graph_of_region(
    name: str, call: int, operands: Any, sizes: Any, trains: bool
) -> tuple[str, fx.GraphModule]:
    return _graph_of(name, "forward" if trains else "inference")


def _graph_of_region_backward(
    name: str, call: int, kept: Any, sizes: Any
) -> tuple[str, fx.GraphModule]:
    return _graph_of(name, "backward")


def _graph_of(name: str, kind: Any) -> tuple[str, fx.GraphModule]:
    return f"body_{name.replace('-', '_')}_{kind}", body_of(name).half(kind)
