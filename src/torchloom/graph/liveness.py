"""Which values of a graph are alive when: a first look, without aliases or reuse.

Views count as nothing of their own, because they share what they view. The exact peak, with storage
aliases and the compiler's reuse of buffers, is the planner's business.
"""

from __future__ import annotations

from torch import fx

from torchloom.graph.alias import viewed
from torchloom.graph.nodes import is_on_host, nbytes


def live_bytes(graph: fx.Graph) -> tuple[int, ...]:
    """Return the bytes alive after each node: inputs from the start, results until their last use."""
    nodes = list(graph.nodes)
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        last_use.setdefault(node, index)
        for used in node.all_input_nodes:
            owner: fx.Node | None = used
            while owner is not None:  # who reads a view keeps what it views
                last_use[owner] = index
                owner = viewed(owner)
    dies: dict[int, int] = {}
    alive, curve = 0, []
    for index, node in enumerate(nodes):
        if node.op != "output" and viewed(node) is None:
            size = 0 if is_on_host(node) else nbytes(node)
            alive += size
            dies[last_use[node]] = dies.get(last_use[node], 0) + size
        alive -= dies.pop(index, 0)
        curve.append(alive)
    return tuple(curve)
