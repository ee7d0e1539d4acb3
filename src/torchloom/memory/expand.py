"""A graph with the nodes of bodies in the place of their calls: what runs, one call after the other.

A body is one graph with one set of fake tensors, and several calls of it are alive at the same time. So
each copied node says which storages its values are in that call: an operand's and a result's are those of the
calling graph, all others are the call's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from torchloom.graph import args_of, forward_nodes, value_of
from torchloom.memory.storages import CALL_STORAGES, CallStorages
from torchloom.ops.regions import (
    body_of,
    half_of_node,
    inputs_of,
    is_call_of_body,
    region_backward,
)


def expanded(graph: fx.Graph) -> fx.Graph:
    """Return a graph without calls of bodies, for simulations; it never runs.

    Args:
        graph: a lowered graph; returned itself if it calls no body.
    """
    return _expanded(graph, _inlined)


def _expanded(
    graph: fx.Graph,
    run: Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], list[fx.Node]],
) -> fx.Graph:
    """Copy a graph, with what `run` appends in the place of a call; itself if it calls no body."""
    if not any(is_call_of_body(node) for node in graph.nodes):
        return graph
    found = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    called: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_call_of_body(node):
            called[node] = run(found, node, env)
        elif node.target is operator.getitem and node.args[0] in called:
            values = called[node.args[0]]
            if node.args[1] < len(values):  # behind, it hands values to its own backward
                env[node] = values[node.args[1]]
        else:
            env[node] = found.node_copy(node, env.__getitem__)
    return found


class CalledPart(NamedTuple):
    """What one call of a body is in an expanded joint graph."""

    body: str
    call: int
    """Its number."""
    names: dict[fx.Node, str]
    """Its nodes of the forward half, with their names in the body's joint graph."""
    results: tuple[fx.Node, ...]
    """What it returns to the graph."""


class ExpandedJoint(NamedTuple):
    """A joint graph with the nodes of bodies in the place of their calls."""

    graph: fx.Graph
    parts: tuple[CalledPart, ...]


def expanded_joint(joint: fx.Graph) -> ExpandedJoint:
    """Return a joint graph without calls of bodies, for plans; it never runs.

    Args:
        joint: returned itself if it calls no body. Nodes outside of calls keep their names.
    """
    calls: dict[int, _JointCall] = {}

    def run(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
        number = args_of(node)[1]
        if node.target is region_backward:
            return calls[number].run_backward(graph, node, env)
        calls[number] = _JointCall(node)
        return calls[number].run_forward(graph, env)

    graph = _expanded(joint, run)
    return ExpandedJoint(graph, tuple(each.part for each in calls.values()))


class _JointCall:
    """A call of a joint graph with its backward: both copy nodes of the body's joint graph."""

    def __init__(self, call: fx.Node) -> None:
        self._call, self._name = call, args_of(call)[0]
        self._body = body_of(self._name)
        self._joint = self._body.joint_graph
        self._copies = _Copies(call)
        nodes = [n for n in self._joint.nodes if n.op not in ("placeholder", "output")]
        # Constants are there from the beginning.
        half = {*forward_nodes(self._joint), *(n for n in nodes if n.op == "get_attr")}
        self._forward = [node for node in nodes if node in half]
        self._backward = [node for node in nodes if node not in half]
        self._inputs = self._joint.find_nodes(op="placeholder")
        values = args_of(self._joint.output_node())[0]
        self._results = values[: self._body.num_results]
        grads = values[self._body.num_results :]
        self._grads = [grads[index] for index in self._body.differentiated]

    @property
    def part(self) -> CalledPart:
        """What it has become."""
        own = self._copies.own
        names = {own[node]: node.name for node in self._forward if node.op == "call_function"}
        results = tuple(own[node] for node in self._results)
        return CalledPart(self._name, args_of(self._call)[1], names, results)

    def run_forward(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
        """Append the nodes of forward; return the results."""
        given = [env[each] for each in inputs_of(self._call)]
        inputs = self._inputs[: len(given)]
        return self._copies.append(graph, self._forward, inputs, given, self._results, self._call)

    def run_backward(
        self, graph: fx.Graph, call: fx.Node, env: dict[fx.Node, fx.Node]
    ) -> list[fx.Node]:
        """Append the nodes of backward; return the gradients of operands."""
        tangents = self._inputs[len(inputs_of(self._call)) :]
        kept = args_of(call)[2]
        given = [env[each] for each in kept[len(kept) - len(tangents) :]]
        return self._copies.append(graph, self._backward, tangents, given, self._grads, call)


def _inlined(graph: fx.Graph, call: fx.Node, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Append a body's nodes to a graph; return what the call returns."""
    half = half_of_node(call).graph_module.graph
    given = [env[each] for each in inputs_of(call)]
    results: Any = half.output_node().args[0]
    inputs = half.find_nodes(op="placeholder")
    nodes = [node for node in half.nodes if node.op not in ("placeholder", "output")]
    return _Copies(call).append(graph, nodes, inputs, given, results, call)


class _Copies:
    """Copies nodes of a body for one call.

    Args:
        call: the node that calls it.
    """

    def __init__(self, call: fx.Node) -> None:
        name, number, *_ = args_of(call)
        modules = body_of(name).modules
        self._call = call
        self.own: dict[fx.Node, fx.Node] = {}
        """By the body's nodes: their copies, and what is given for its inputs."""
        self._storages = CallStorages(f"{number} {call.name}")
        self._own_module = next(iter(modules.values()), "")
        self._module = modules.get(number, self._own_module)

    def append(
        self,
        graph: fx.Graph,
        nodes: Iterable[fx.Node],
        inputs: Iterable[fx.Node],
        given: Sequence[fx.Node],
        results: Sequence[fx.Node],
        call: fx.Node,
    ) -> list[fx.Node]:
        """Append copies of nodes to the calling graph; return those of the results.

        Args:
            graph: what is made of the calling graph.
            nodes: of the body, in order.
            inputs: of the body.
            given: what the calling graph gives for them.
            results: of the body, which lie where what picks them in the calling graph lies.
            call: of the body's forward or backward.
        """
        own = self.own
        for inside, outside in zip(inputs, given, strict=True):
            own[inside] = outside
            self._storages.name_as(value_of(inside), outside)
        for node, pick in zip(results, _picks(call, len(results)), strict=True):
            if pick is not None:
                self._storages.name_as(value_of(node), pick)
        for node in nodes:
            new = own[node] = graph.create_node(
                node.op,
                node.target,
                fx.node.map_arg(node.args, own.__getitem__),
                fx.node.map_arg(dict(node.kwargs), own.__getitem__),
                f"{self._call.name}__{node.name}",
            )
            new.meta = {**node.meta, CALL_STORAGES: self._storages}
            for key in _STACKS:
                if node.meta.get(key):
                    new.meta[key] = _in_module(node.meta[key], self._own_module, self._module)
        return [own[node] for node in results]


_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def _in_module(stack: Mapping[str, Any], own: str, called: str) -> dict[str, Any]:
    """Return the modules of a body's node with the module of a call in the place of the body's own."""
    return {
        key: (called + path.removeprefix(own), kind)
        if own and _is_part(path, own)
        else (path, kind)
        for key, (path, kind) in stack.items()
    }


def _is_part(path: str, module: str) -> bool:
    """Say whether a path is that of a module or of one inside of it."""
    return path == module or path.startswith(f"{module}.")


def _picks(call: fx.Node, num_results: int) -> list[fx.Node | None]:
    found: list[fx.Node | None] = [None] * num_results
    for user in call.users:
        index: Any = user.args[1]
        if index < num_results:
            found[index] = user
    return found
