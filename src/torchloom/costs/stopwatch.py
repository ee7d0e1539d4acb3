"""Time code that runs on tensors without data, by the cost table, one operator after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from torchloom._torch.modes import DispatchMode
from torchloom.costs.table import CostTable, node_us


class Stopwatch(DispatchMode):
    """Adds up what the operators of a `with` block would take, eagerly, on the device of a cost table.

    Args:
        table: of this machine, or of one that is simulated.

    Example:
        >>> left, right = torch.empty(2, 512, 512, device="meta")
        >>> with Stopwatch(CostTable()) as watch:
        ...     product = left @ right
        >>> watch.us > 100
        True
    """

    def __init__(self, table: CostTable) -> None:
        super().__init__()
        self.us = 0.0
        self._table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions such as for a tensor's device
            self.us += node_us(_node_of(func, args, kwargs or {}, result), self._table)
        return result


def _node_of(func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
    """Return a call as a node of a graph, as cost tables know operators."""
    graph, inputs = fx.Graph(), dict[int, fx.Node]()

    def as_node(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in inputs:
                inputs[id(value)] = graph.placeholder("x")
                inputs[id(value)].meta["val"] = value
            return inputs[id(value)]
        return value

    node = graph.call_function(
        func, fx.node.map_aggregate(args, as_node), fx.node.map_aggregate(kwargs, as_node)
    )
    node.meta["val"] = result
    return node
