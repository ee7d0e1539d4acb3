"""Which storages the values of a graph occupy: aliases share one, so bytes are counted once.

Tracing records a fake tensor for each value. A view's fake tensor shares the fake storage of what
it views, also from the joint graph to the two graphs that it is split into: a tensor that forward
saves and the input of backward are one storage.

`Transit` is what communication holds and no graph shows: the transport says how much.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from torchloom import ops
from torchloom._torch.tensors import size_hint
from torchloom.graph import args_of, is_fetched, is_on_host, tensors_in, value_of

Storage = Hashable
"""Identity of a fake storage. Valid as long as the graph, whose values keep it alive."""
CALL_STORAGES = "torchloom_storages"
"""Meta of a node that was copied out of a body: what its storages are in that call."""


class CallStorages:
    """The storages of one call of a body, by those of the body's own fake tensors.

    Args:
        call: tells the call from others.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._known: dict[int, Storage] = {}

    def name_as(self, value: Any, node: fx.Node) -> None:
        """Say that a value of the body lies where a node's value does."""
        for own, outside in zip(tensors_in(value), storages_of(node), strict=False):
            self._known.setdefault(own.untyped_storage()._cdata, outside)

    def of(self, storage: int) -> Storage:
        """Return what a storage of the body is in this call."""
        return self._known.get(storage, (self._call, storage))


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
    cdata = [tensor.untyped_storage()._cdata for tensor in tensors]
    call: CallStorages | None = node.meta.get(CALL_STORAGES)
    names = cdata if call is None else [call.of(each) for each in cdata]
    return dict(zip(names, sizes, strict=True))


def outputs_of(graph: fx.Graph) -> list[tuple[Any, str]]:
    """Return what a graph returns, each with the type name of AOTAutograd's descriptor; "NoneType" where there is none."""
    output = graph.output_node()
    values: Any = output.args[0]
    described: Any = output.meta.get("desc") or [None] * len(values)
    return [(v, type(role).__name__) for v, role in zip(values, described, strict=True)]


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


Weight = tuple[str, Any]
"""A weight that stays gathered: the parameter's name, and the dtype of the whole."""


class ResidentUse(NamedTuple):
    """One read of a weight that stays gathered from step to step."""

    shard: Any
    """Fake tensor of this rank's shard."""
    dtype: Any
    handle: str
    is_fetched: bool
    """Whether the shard waits on the host."""


@dataclass(frozen=True, slots=True)
class Transit:
    """How much memory a transport holds besides the results of collectives."""

    started_bytes: Callable[[Any, Sequence[Any]], int]
    """Bytes from a collective's start to its wait: by its operator and its arguments, fake tensors
    among them."""
    regathered_bytes: Callable[[Sequence[ResidentUse]], list[int]]
    """Bytes while weights are gathered anew that stay gathered, each at its first use in a step: by
    these uses in order. A use may gather what follows as well: of one graph, so where a model has
    several, the first may hold up to a bucket more."""


def regathered_at(nodes: Iterable[fx.Node], transit: Transit) -> dict[fx.Node, int]:
    """Return what nodes hold while they gather weights anew that stay gathered.

    Args:
        nodes: forward's and then backward's, in order.
        transit: of the transport.
    """
    first: dict[Weight, fx.Node] = {}
    for node in nodes:
        if node.target is ops.resident:
            _, dtype, _, _, param = args_of(node)
            first.setdefault((param, dtype), node)
    uses = []
    for node in first.values():
        shard, dtype, _, handle, _ = args_of(node)
        uses.append(ResidentUse(value_of(shard), dtype, handle, is_fetched(node)))
    return dict(zip(first.values(), transit.regathered_bytes(uses), strict=True))
