"""Finds the first node whose compiled value differs from eager.

1. Compile the graph once with every tensor as an output and compare them in order.
2. Outputs that must be kept change what is fused, and may make the error vanish: then compile
   prefixes of the graph that return a single node, by bisection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchloom.backends.compare import Tolerance, first_difference
from torchloom.backends.graphs import clone_inputs, copy_graph_module

Compile = Callable[[fx.GraphModule, Sequence[Any]], Any]


@dataclass(frozen=True)
class Place:
    """A node whose value differs."""

    node: str
    expression: str
    user_line: str | None
    text: str

    def __str__(self) -> str:
        where = f", {self.user_line}" if self.user_line else ""
        return f"node {self.node!r} = {self.expression}{where}"


def locate(
    gm: fx.GraphModule, inputs: Sequence[Any], compile_fn: Compile, tolerance: Tolerance
) -> Place | None:
    """Return the first node of `gm` that differs from eager, or None if no part of the graph reproduces the difference.

    Args:
        gm: the captured graph, untouched.
        inputs: real inputs at which the whole graph differs.
        compile_fn: the backend.
        tolerance: what counts as different.
    """
    names = _tensor_nodes(gm, inputs)

    def differs(chosen: Sequence[str]) -> tuple[int, str] | None:
        cut = _returning(gm, chosen)
        expected = cut(*clone_inputs(inputs))
        with torch.random.fork_rng():
            actual = compile_fn(copy_graph_module(cut), clone_inputs(inputs))(*clone_inputs(inputs))
        return first_difference(list(actual), list(expected), tolerance)

    found = differs(names)
    if found is not None:
        return _place(gm, names[found[0]], found[1])
    low, high, text = 0, len(names) - 1, ""
    last = differs(names[high:]) if names else None
    if last is None:
        return None
    text = last[1]
    while low < high:
        middle = (low + high) // 2
        found = differs([names[middle]])
        if found is None:
            low = middle + 1
        else:
            high, text = middle, found[1]
    return _place(gm, names[high], text)


class _Values(fx.Interpreter):
    """Runs a graph and notes which nodes are tensors."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.tensors: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output") and isinstance(value, Tensor):
            self.tensors.append(n.name)
        return value


def _tensor_nodes(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    values = _Values(gm)
    with torch.random.fork_rng():
        values.run(*clone_inputs(inputs))
    return values.tensors


def _returning(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Return a copy of `gm` that stops after the last of `names` and returns them."""
    cut = copy_graph_module(gm)
    nodes = {node.name: node for node in cut.graph.nodes}
    *_, output = cut.graph.nodes
    output.args = (tuple(nodes[name] for name in names),)
    last = nodes[names[-1]]
    # In-place calls have no users but effects: only those after the last wanted node may go.
    for node in reversed(list(cut.graph.nodes)):
        if node is last:
            break
        if node is not output and not node.users and node.op != "placeholder":
            cut.graph.erase_node(node)
    cut.recompile()
    return cut


def _place(gm: fx.GraphModule, name: str, text: str) -> Place:
    node = next(node for node in gm.graph.nodes if node.name == name)
    target = node.target if isinstance(node.target, str) else _qualified(node.target)
    args = ", ".join(str(arg) for arg in node.args)
    return Place(name, f"{target}({args})", _user_line(node), text)


def _qualified(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{name}" if module and not module.startswith("_") else name


def _user_line(node: fx.Node) -> str | None:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else None
