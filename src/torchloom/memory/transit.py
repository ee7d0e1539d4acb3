"""Memory that communication holds and no graph shows. The transport says how much; see `Transit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from torchloom import ops
from torchloom.graph import args_of, is_fetched, value_of

Weight = tuple[str, Any]
"""A weight that stays gathered: the parameter's name, and the dtype of the whole."""


class Use(NamedTuple):
    """A graph reads a weight that stays gathered from step to step."""

    piece: Any
    """Fake tensor of this rank's piece."""
    dtype: Any
    handle: str
    is_fetched: bool
    """Whether the piece waits on the host."""


@dataclass(frozen=True, slots=True)
class Transit:
    """What a transport holds besides results."""

    started: Callable[[Any, Sequence[Any]], int]
    """Bytes from a collective's start to its wait: by its operator and its arguments, fake tensors
    among them."""
    refreshed: Callable[[Sequence[Use]], list[int]]
    """Bytes while weights are gathered anew that stay gathered, each at its first use in a step: by
    these uses in order. A use may gather what follows as well: of one graph, so where a model has
    several, the first may hold up to a bucket more."""


def refreshed_at(nodes: Iterable[fx.Node], transit: Transit) -> dict[fx.Node, int]:
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
        piece, dtype, _, handle, _ = args_of(node)
        uses.append(Use(value_of(piece), dtype, handle, is_fetched(node)))
    return dict(zip(first.values(), transit.refreshed(uses), strict=True))
