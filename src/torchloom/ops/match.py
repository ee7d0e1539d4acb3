"""Finding our operators in a graph: starts with their results and waits."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import fx

from torchloom.graph.nodes import args_of, find, nbytes
from torchloom.ops.copies import offload_start, reload_start
from torchloom.ops.lowered import gather_start, reduce_start, sync_start, wait_


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
        per_tensor = {reduce_start: 2}.get(self.start.target, 1)
        return (self.start.target, *args_of(self.start)[per_tensor:])


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
