"""Which storages the values of a graph occupy: aliases share one, so bytes are counted once.

Tracing records a fake tensor for each value. A view's fake tensor shares the fake storage of what
it views, also from the joint graph to the two graphs that it is split into: a tensor that forward
saves and the input of backward are one storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchloom._torch import size_hint
from torchloom.graph import is_on_host, tensors_in, value_of

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


def distinct_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the storages behind tensors, each once; what is no tensor counts nothing.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> distinct_bytes([x, x.t(), "no tensor"])
        24
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum({each.untyped_storage()._cdata: _nbytes(each) for each in tensors}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    return size_hint(tensor.untyped_storage().nbytes())
