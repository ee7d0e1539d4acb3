"""Which storages the values of a graph occupy: aliases share one, so bytes are counted once.

Tracing records a fake tensor for each value. A view's fake tensor shares the fake storage of what
it views, also from the joint graph to the two graphs that it is split into: a tensor that forward
saves and the input of backward are one storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchloom.graph import is_on_host, value_of

Storage = int
"""Identity of a fake storage. Valid as long as the graph, whose values keep it alive."""


def storages_of(node: fx.Node, real: Sequence[int] = ()) -> dict[Storage, int]:
    """Return the storages that a node's tensors occupy on the device, with their bytes.

    Args:
        node: any node.
        real: bytes that the storages of its tensors were found to have; the fake tensors' if empty.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.empty(2, 3)
        >>> list(storages_of(x).values())
        [24]
    """
    if is_on_host(node):
        return {}
    tensors = list(tensors_in(value_of(node)))
    sizes = real if len(real) == len(tensors) else [_nbytes(tensor) for tensor in tensors]
    return {
        tensor.untyped_storage()._cdata: size for tensor, size in zip(tensors, sizes, strict=True)
    }


def _nbytes(tensor: torch.Tensor) -> int:
    size = tensor.untyped_storage().nbytes()
    return size if isinstance(size, int) else int(size)  # a symbolic size counts as it was traced


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a node's value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
