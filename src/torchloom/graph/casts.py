"""Values that a graph reads only in a lower dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from torchloom.graph.edit import call, replace
from torchloom.graph.nodes import args_of, value_of

aten = torch.ops.aten
_CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
_TRAVELS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Not all transports know narrower ones."""
_REORDERS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.detach.default,
        aten.alias.default,
    }
)
"""Views of all elements of a value, each of them once."""


class LowerReaders(NamedTuple):
    """What reads a value in one lower dtype alone."""

    dtype: torch.dtype
    views: list[fx.Node]
    """In the order in which they depend on each other."""
    casts: list[fx.Node]


def lower_readers(node: fx.Node) -> LowerReaders | None:
    """Return the views and casts of a value if nothing reads it in its own dtype, else None."""
    views, casts = list[fx.Node](), list[fx.Node]()
    chain = [node]
    for each in chain:  # grows while it is walked
        for user in each.users:
            if user.target in _CASTS and _only_casts(user, each):
                casts.append(user)
            elif user.target in _REORDERS and not user.kwargs:
                views.append(user)
                chain.append(user)
            else:
                return None
    dtypes = {value_of(cast).dtype for cast in casts}
    if len(dtypes) != 1 or not _is_lower(dtype := dtypes.pop(), value_of(node).dtype):
        return None
    return LowerReaders(dtype, views, casts)


def read_lower(graph: fx.Graph, node: fx.Node, lower: fx.Node, readers: LowerReaders) -> None:
    """Let the readers of a value read the same in their dtype.

    Args:
        graph: edited in place; the value's readers go, the value itself stays.
        node: the value.
        lower: the value in the readers' dtype.
        readers: of the value.
    """
    lowered = {node: lower}
    for view in readers.views:
        source = lowered[args_of(view)[0]]
        with graph.inserting_before(view):
            lowered[view] = call(graph, view.target, (source, *args_of(view)[1:]), name=view.name)
    for cast in readers.casts:
        replace(cast, lowered[args_of(cast)[0]])
    for view in reversed(readers.views):
        graph.erase_node(view)


def _only_casts(cast: fx.Node, source: fx.Node) -> bool:
    """Say whether a cast changes the dtype and neither device nor layout, so that its input can stand for it."""
    before, after = value_of(source), value_of(cast)
    return before.device == after.device and before.stride() == after.stride()


def _is_lower(dtype: torch.dtype, kept: torch.dtype) -> bool:
    return dtype in _TRAVELS and kept.is_floating_point and dtype.itemsize < kept.itemsize
