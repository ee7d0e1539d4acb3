"""A graph with a symbol for the number of rows, evaluated for given numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from torchloom.graph import written
from torchloom.pieces.symbols import with_numbers
from torchloom.serve.builder.trace import Traced

MIXES = "lets rows see one another, and so padding"
DEEPER = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
VMAP = frozenset({"_remove_batch_dim", *DEEPER})
"""Operators around a function that vmap calls: in it, sizes that it goes over are not there."""

At = Mapping[fx.Node, Any]
"""What the tensors and sizes of a graph look like for one number of rows, by node."""


class MixedError(Exception):
    """An operator lets rows see one another.

    Args:
        node: the operator.
        text: what it does.
    """

    def __init__(self, node: fx.Node, text: str) -> None:
        super().__init__(text)
        self.node = node


@dataclass
class Views:
    """What a graph looks like for numbers of rows."""

    traced: Traced
    hint: int
    _known: dict[int, dict[int, At]] = field(default_factory=dict)

    def at(self, module: fx.GraphModule, rows: int) -> At:
        """Return tensors without values, and numbers, for nodes that have any of these."""
        known = self._known.setdefault(id(module), {})
        if rows not in known:
            known[rows] = self._at(module, rows)
        return known[rows]

    def _at(self, module: fx.GraphModule, rows: int) -> At:
        examples = {
            node: node.meta["example_value"]
            for node in module.graph.nodes
            if "example_value" in node.meta
        }
        leaves: list[Any] = []
        for value in examples.values():
            map_aggregate(value, lambda leaf: leaves.append(leaf) if _is_leaf(leaf) else None)
        found = dict(zip(map(id, leaves), self._numbers(leaves, rows), strict=True))
        return {
            node: map_aggregate(value, lambda leaf: found.get(id(leaf), leaf))
            for node, value in examples.items()
        }

    def _numbers(self, leaves: list[Any], rows: int) -> list[Any]:
        env = self.traced.graph.env
        try:
            return with_numbers(leaves, env, {self.hint: rows})[1]
        except Exception:  # noqa: BLE001 - torch has many errors for sizes that follow from values
            return [self._number(leaf, rows) for leaf in leaves]

    def _number(self, leaf: Any, rows: int) -> Any:
        try:
            return with_numbers([leaf], self.traced.graph.env, {self.hint: rows})[1][0]
        except Exception:  # noqa: BLE001 - as above: this is the one
            return UNKNOWN


UNKNOWN: Any = object()
"""A tensor whose size follows from values."""


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.SymInt))


def flat(value: Any) -> list[Any]:
    """Return tensors, and what stands for unknown ones, in order."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or leaf is UNKNOWN:
            found.append(leaf)
        return leaf

    map_aggregate(value, add)
    return found


def live_in(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose results reach the output, or that write to a tensor."""
    found: set[fx.Node] = set()
    waiting = [
        node for node in graph.nodes if node.op == "output" or written(node) or is_opaque(node)
    ]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def name_of(node: fx.Node) -> str:
    """Return what a node calls, without namespace and overload."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def is_opaque(node: fx.Node) -> bool:
    """Say whether an operator is none of torch's own."""
    target: Any = node.target
    if node.op != "call_function":
        return False
    space = getattr(target, "namespace", None)
    if space is None and hasattr(target, "_qualified_op_name"):
        space = target._qualified_op_name.partition("::")[0]
    if space is not None:
        return space not in ("aten", "prims", "higher_order")
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] not in (
        "",
        "torch",
        "_operator",
        "operator",
        "math",
        "builtins",
    )


def subgraphs(node: fx.Node, module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the graphs that an operator of higher order runs."""
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            inner = getattr(module, str(each.target), None)
            if isinstance(inner, fx.GraphModule):
                yield inner
