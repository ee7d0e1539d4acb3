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

from torchloom.regions.checkpoints import checkpointed, replace_body
from torchloom.regions.labels import traced_value


def part_reads(gm: fx.GraphModule) -> None:
    """Part reads of values whose gradient is wanted.

    Args:
        gm: a copy of a captured graph; its checkpointed bodies are replaced, not changed.
    """
    for node, body, given in checkpointed(gm):
        num_inputs = len(given)
        for each in list(given):
            if getattr(traced_value(given[each]), "requires_grad", False):
                _part(body.graph, each, given)
        if len(given) > num_inputs:
            replace_body(gm, node, body, given)


def _part(graph: fx.Graph, read: fx.Node, given: dict[fx.Node, Any]) -> None:
    """Give reads of an input inputs of their own; `given` gets what these are given.

    A call of the checkpoint is one node of the graph around it, which hands gradients on input by input: those of
    the last node first, as without the checkpoint.
    """
    end = next(each for each in graph.nodes if each.op != "placeholder")
    users = [each for each in reversed(graph.nodes) if each in read.users]
    places = [(user, place) for user in users for place in _places(user, read)]
    for user, place in places[1:]:
        with graph.inserting_before(end):
            own = graph.placeholder(f"{read.name}_again")
        own.target = own.name  # which is no other's
        own.meta = dict(read.meta)
        given[own] = given[read]
        _read_at(user, place, own)


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
