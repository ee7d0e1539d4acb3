"""The peak of a call of a body: of its half, run with what the calling graph gives it.

A body that is called like another one, with operands that die in the same places, has the same peak: it is
simulated once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import fx

from torchloom.memory.storages import Storage, storages_of
from torchloom.ops.regions import half_of_node

Peak = Callable[..., int]
"""`(nodes, outputs, held=..., sizes=...) -> bytes`; see `graph_memory_of`."""


class CallPeaks:
    """Peaks of the calls of one graph.

    Args:
        peak_of: simulates a graph.
    """

    def __init__(self, peak_of: Peak) -> None:
        self._peak_of = peak_of
        self._known: dict[Hashable, int] = {}

    def of(
        self,
        call: fx.Node,
        operands: Sequence[Mapping[Storage, int]],
        freed: Mapping[Storage, int],
    ) -> int:
        """Return the highest sum of bytes while a body runs, above what was live before its call.

        Args:
            call: the node.
            operands: storages of what it takes.
            freed: of these, with their bytes, those that nobody reads afterwards: the body frees them.
        """
        graph = half_of_node(call).graph_module.graph
        inputs = graph.find_nodes(op="placeholder")
        sizes: dict[Storage, int] = {}
        for storage, index in _ends(graph, operands, freed).items():
            for own in storages_of(inputs[index]):
                sizes[own] = sizes.get(own, 0) + freed[storage]
        key = graph, frozenset(sizes.items())
        if key not in self._known:
            taken = {own for node in inputs for own in storages_of(node)}
            outputs: Any = graph.output_node().all_input_nodes
            held = taken - sizes.keys()
            self._known[key] = self._peak_of(graph.nodes, outputs, held=held, sizes=sizes)
        return self._known[key]


def _ends(
    graph: fx.Graph, operands: Sequence[Mapping[Storage, int]], freed: Mapping[Storage, int]
) -> dict[Storage, int]:
    """Return the operand with which each storage dies: of several that are one storage, the one read last."""
    inputs = graph.find_nodes(op="placeholder")
    last_use = {used: at for at, node in enumerate(graph.nodes) for used in node.all_input_nodes}
    found: dict[Storage, int] = {}
    for index, outside in enumerate(operands):
        for storage in outside.keys() & freed.keys():
            other = found.get(storage, index)
            found[storage] = max(other, index, key=lambda i: last_use.get(inputs[i], -1))
    return found
