"""Give each read of a value within the user's checkpoints an input of its own, as any other part of a graph has.

    before   checkpoint(body, x)               body: x + f(x)
    after    checkpoint(body', x, x)           body': x1 + f(x0)

Autograd adds the gradients of `x` one by one. If `x` is also read elsewhere, the sum of two of them is no number of the
flat graph, where a checkpoint is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from torchloom._torch.bodies import CHECKPOINT
from torchloom.backends.graphs import copy_graph_module
from torchloom.regions.labels import module_of_attr, traced_value


def part_reads(gm: fx.GraphModule) -> None:
    """Part reads of values whose gradient is wanted.

    Args:
        gm: a copy of a captured graph; its checkpointed bodies are replaced, not changed.
    """
    for node in list(gm.graph.find_nodes(op="call_function", target=CHECKPOINT)):
        attr: Any = node.args[0]
        body = module_of_attr(attr)
        if isinstance(body, fx.GraphModule):
            _part(gm, node, attr, body)


def _part(gm: fx.GraphModule, node: fx.Node, attr: fx.Node, body: fx.GraphModule) -> None:
    new_body = copy_graph_module(body)
    graph = new_body.graph
    inputs = graph.find_nodes(op="placeholder")
    given: dict[fx.Node, Any] = dict(zip(inputs, node.args[1:], strict=True))
    end = next(each for each in graph.nodes if each.op != "placeholder")
    order = {each: index for index, each in enumerate(graph.nodes)}
    for each in inputs:
        if not getattr(traced_value(given[each]), "requires_grad", False):
            continue
        is_first = True
        for user in sorted(each.users, key=order.__getitem__):
            for place in _places(user, each):
                if is_first:
                    is_first = False
                    continue
                with graph.inserting_before(end):
                    own = graph.placeholder(f"{each.name}_again")
                own.meta = dict(each.meta)
                given[own] = given[each]
                _read_at(user, place, own)
    if len(given) == len(inputs):
        return
    name = f"{attr.target}_parted".replace(".", "_")
    new_body.recompile()
    gm.add_module(name, new_body)
    with gm.graph.inserting_before(node):
        new_attr = gm.graph.get_attr(name)
    node.args = (new_attr, *given.values())
    if not attr.users:
        gm.graph.erase_node(attr)


def _places(user: fx.Node, used: fx.Node) -> Iterator[int]:
    """Return at which of its inputs, counted through all arguments, a node reads a value."""
    found: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), found.append)
    return (place for place, each in enumerate(found) if each is used)


def _read_at(user: fx.Node, place: int, new: fx.Node) -> None:
    """Let a node read another value at one of its inputs."""
    count = iter(range(place + 1))

    def read(old: fx.Node) -> fx.Node:
        return new if next(count, -1) == place else old

    args, kwargs = fx.node.map_arg((user.args, user.kwargs), read)
    user.args, user.kwargs = args, kwargs
