"""Finding our operators in a graph: starts with their results and waits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from torchloom.graph.edit import call
from torchloom.graph.nodes import args_of, find, nbytes
from torchloom.ops.lowered import (
    gather_start,
    offload_start,
    reduce_start,
    reload_start,
    sync_start,
    wait_,
)

aten = torch.ops.aten
_WEIGHT_VIEWS = frozenset(
    {
        aten.t.default,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.detach.default,
        aten.alias.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
        # A cast weight is a weight: kept, it would cost as much as the gathered one.
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


_PER_TENSOR: dict[object, int] = {gather_start: 2, reduce_start: 3, sync_start: 2}
"""How many of a start's first arguments are lists of one value per tensor; else one."""


class Transfer(NamedTuple):
    """One start, the nodes that pick its results, and its wait."""

    start: fx.Node
    results: list[fx.Node]
    wait: fx.Node

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensors that go on the wire."""
        return list(args_of(self.start)[0])

    @property
    def result_bytes(self) -> int:
        """Bytes of the results."""
        return nbytes(self.start)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(nbytes(node) for node in self.inputs)

    @property
    def family(self) -> tuple[object, ...]:
        """Transfers of one family can share a start."""
        per_tensor = _PER_TENSOR.get(self.start.target, 1)
        return (self.start.target, *args_of(self.start)[per_tensor:])


def with_views(weight: fx.Node) -> list[fx.Node]:
    """Return a gather of the joint graph, and the views and casts of its result."""
    chain = [weight]
    for link in chain:  # grows while it is walked
        chain += [user for user in link.users if user.target in _WEIGHT_VIEWS]
    return chain


def gathers(graph: fx.Graph) -> list[Transfer]:
    """Return the gathers that have been placed, in execution order."""
    return _transfers(graph, (gather_start,))


def reductions(graph: fx.Graph) -> list[Transfer]:
    """Return the reductions and syncs that have been placed, in execution order."""
    return _transfers(graph, (reduce_start, sync_start))


def offloads(graph: fx.Graph) -> list[Transfer]:
    """Return the copies to the host that have been placed, in execution order."""
    return _transfers(graph, (offload_start,))


def reloads(graph: fx.Graph) -> list[Transfer]:
    """Return the copies to the device that have been placed, in execution order."""
    return _transfers(graph, (reload_start,))


def _transfers(graph: fx.Graph, starts: tuple[object, ...]) -> list[Transfer]:
    waits = {args_of(node)[0][0]: node for node in find(graph, wait_)}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in starts:
            continue
        picks = [user for user in node.users if user.target is operator.getitem]
        picks.sort(key=lambda pick: args_of(pick)[1])
        found.append(Transfer(node, picks, waits[picks[0]]))
    return found


def merge(graph: fx.Graph, group: Sequence[Transfer], before: fx.Node) -> Transfer:
    """Make one transfer of several of one family; its start and its wait stand before a node.

    The node may be none of those that the transfers consist of, unless it is the start of one.
    """
    head = group[0].start
    inputs = [node for transfer in group for node in transfer.inputs]
    rest: list[object] = list(args_of(head)[1:])
    for place in range(1, _PER_TENSOR.get(head.target, 1)):
        rest[place - 1] = [each for transfer in group for each in args_of(transfer.start)[place]]
    picks = [pick for transfer in group for pick in transfer.results]
    with graph.inserting_before(before):
        start = call(graph, head.target, (inputs, *rest))
        merged = [
            call(graph, operator.getitem, (start, i), name=pick.name)
            for i, pick in enumerate(picks)
        ]
        wait = call(graph, wait_, (merged, inputs, args_of(head)[-1]))
    for transfer in group:
        graph.erase_node(transfer.wait)
    for old, new in zip(picks, merged, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    for transfer in group:
        graph.erase_node(transfer.start)
    return Transfer(start, merged, wait)
