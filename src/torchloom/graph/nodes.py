"""Questions about nodes: which op, how many bytes, where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torchloom._torch.tensors import size_hint


def find(graph: fx.Graph, op: Any) -> list[fx.Node]:
    """Return the calls of `op` in graph order."""
    return list(graph.find_nodes(op="call_function", target=op))


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments, typed as what a caller that knows the op expects."""
    return node.args


def value_of(node: fx.Node) -> Any:
    """Return the fake value that tracing recorded for a node, or None."""
    return node.meta.get("val")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value that may be a tensor or lists and dicts of values, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def mark_host(*nodes: fx.Node) -> None:
    """Say that the values of nodes live in host memory; the mark follows them through the split."""
    for node in nodes:
        node.meta["torchloom_on_host"] = True


def is_on_host(node: fx.Node) -> bool:
    """Say whether a node's value lives in host memory, and takes none of the device's."""
    return bool(node.meta.get("torchloom_on_host"))


def mark_fetched(node: fx.Node) -> None:
    """Say that a node reads its first argument from host memory, whenever it has to read it."""
    node.meta["torchloom_fetched"] = True


def is_fetched(node: fx.Node) -> bool:
    """Say whether a node reads its first argument from host memory."""
    return bool(node.meta.get("torchloom_fetched"))


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensors; unknown sizes count as what the trace saw.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.empty(2, 3)
        >>> nbytes(x)
        24
    """
    return sum(_tensor_bytes(value) for value in tensors_in(value_of(node)))


def first_call(graph: fx.Graph) -> fx.Node:
    """Return the first node that is not an input."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return each node's index in execution order; stale after an edit."""
    return {node: index for index, node in enumerate(graph.nodes)}


def _tensor_bytes(value: torch.Tensor) -> int:
    return math.prod(size_hint(size) for size in value.shape) * value.element_size()
