"""Merge neighbouring transfers into buckets.

    before   [a] = gather_start([x]) .. wait_([a])    [b] = gather_start([y]) .. wait_([b])
    after    [a, b] = gather_start([x, y]) .. wait_([a, b])

Gathers merge at their first member, reductions at their last. A bucket closes at its size limit, at a smaller
one of the plan, or at MOST_MEMBERS. Changes no values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from torchloom.graph import PassContext, positions
from torchloom.ops.match import Transfer, gathers, merge, reductions

MOST_MEMBERS = 64
"""Tensors of one bucket. Dynamo's and Inductor's work for one result of a list grows with the list, so that of a
bucket of all weights of a deep model with the square of its depth. More transfers of small weights cost a step little.
"""


def bucket(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    gather_bytes: int = 16 << 20,
    reduce_bytes: int = 16 << 20,
) -> int:
    """Merge transfers up to a size; return how many starts went away.

    Args:
        gm: a lowered graph with transfers; edited in place.
        ctx: its plan may lower both limits (`choices.bucket_bytes`).
        gather_bytes: gathers are merged until their results reach this many bytes; 0 merges none.
        reduce_bytes: reductions are merged until their inputs reach this many bytes; 0 merges none.
    """
    graph = gm.graph
    planned = None if ctx.choices is None else ctx.choices.bucket_bytes
    most = float("inf") if planned is None else planned
    num_merged = 0
    where = positions(graph)
    for group in _group(
        gathers(graph),
        cap_bytes=min(gather_bytes, most),
        size=lambda transfer: transfer.result_bytes,
        fits=lambda group, new: all(where[node] < where[group[0].start] for node in new.inputs),
    ):
        merge(graph, group, before=group[0].start)
        num_merged += len(group) - 1
    where = positions(graph)
    for group in _group(
        reductions(graph),
        cap_bytes=min(reduce_bytes, most),
        size=lambda transfer: transfer.input_bytes,
        fits=lambda group, new: _not_yet_read(group, new, where),
    ):
        merge(graph, group, before=group[-1].start)
        num_merged += len(group) - 1
    return num_merged


def _group(
    transfers: Sequence[Transfer],
    *,
    cap_bytes: float,
    size: Callable[[Transfer], int],
    fits: Callable[[list[Transfer], Transfer], bool],
) -> list[list[Transfer]]:
    """Group transfers of one family greedily, in order; return groups of two and more."""
    groups: list[list[Transfer]] = []
    open_groups: dict[tuple[object, ...], tuple[list[Transfer], int]] = {}
    for transfer in transfers:
        members, used = open_groups.get(transfer.family, ([], 0))
        needed = used + size(transfer)
        is_full = needed > cap_bytes or len(members) == MOST_MEMBERS
        if members and (is_full or not fits(members, transfer)):
            members, needed = [], size(transfer)
        if not members:
            groups.append(members)
        members.append(transfer)
        open_groups[transfer.family] = (members, needed)
    return [group for group in groups if len(group) > 1]


def _not_yet_read(group: list[Transfer], new: Transfer, where: dict[fx.Node, int]) -> bool:
    readers = (user for old in group for pick in old.results for user in pick.users)
    waits = {old.wait for old in group}
    return all(where[user] > where[new.start] for user in readers if user not in waits)
