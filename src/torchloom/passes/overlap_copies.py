"""Run copies between device and host at the same time as compute.

    before   use x, start x, wait x, ...      start y, wait y, use y
    after    use x, start x, ..., wait x      start y, ..., wait y, use y

At most `slots` copies per direction are under way, and together they hold at most `max_bytes` of device
memory (a single one may be larger). Changes no values.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from torchloom.graph import PassContext, first_call, move_after, move_before, positions, readers
from torchloom.ops.match import Transfer, offloads, reloads


class _Limits(NamedTuple):
    """How many copies of one direction may be under way."""

    slots: int
    max_bytes: int

    def allow(self, under_way: list[Transfer], new_bytes: int) -> bool:
        """Say whether a copy of `new_bytes` may start beside others."""
        used = sum(max(copy.input_bytes, copy.result_bytes) for copy in under_way)
        return len(under_way) < self.slots and used + new_bytes <= self.max_bytes


def overlap_copies(
    gm: fx.GraphModule, ctx: PassContext, *, slots: int = 2, max_bytes: int = 256 << 20
) -> int:
    """Move starts up and waits down; return how many copies moved.

    Args:
        gm: a lowered graph with transfers; edited in place.
        ctx: not used.
        slots: copies that may be under way at a time, per direction.
        max_bytes: device memory that copies under way may hold, per direction.
    """
    limits = _Limits(slots, max_bytes)
    return _sink_offloads(gm.graph, limits) + _hoist_reloads(gm.graph, limits)


def _sink_offloads(graph: fx.Graph, limits: _Limits) -> int:
    where = positions(graph)
    before = dict(where)
    copies = offloads(graph)
    for copy in copies:
        own = {copy.start, copy.wait, graph.output_node()}
        uses = [node for node in readers(copy.inputs) if node not in own]
        last = max([*copy.inputs, *uses], key=where.__getitem__)
        move_after([copy.start, *copy.results, copy.wait], last)
    where = positions(graph)
    copies.sort(key=lambda copy: where[copy.start])
    under_way: list[Transfer] = []
    for copy in copies:
        while under_way and not limits.allow(under_way, copy.input_bytes):
            move_before([under_way.pop(0).wait], copy.start)
        under_way.append(copy)
    for copy in under_way:
        move_before([copy.wait], _first_reader(copy, graph, positions(graph)))
    return _num_moved(graph, copies, before)


def _hoist_reloads(graph: fx.Graph, limits: _Limits) -> int:
    where = positions(graph)
    before = dict(where)
    copies = reloads(graph)
    use = {copy.start: _first_reader(copy, graph, where) for copy in copies}
    copies.sort(key=lambda copy: where[use[copy.start]])
    for copy in copies:
        move_before([copy.start, *copy.results, copy.wait], use[copy.start])
    where = positions(graph)
    inputs_end = first_call(graph).prev
    for index, copy in enumerate(copies):
        # All that were issued before and are not used yet, when this one is issued.
        ahead: list[Transfer] = []
        for earlier in reversed(copies[:index]):
            if not limits.allow([*ahead, earlier], copy.result_bytes):
                break
            ahead.append(earlier)
        earliest = [*copy.inputs]
        if index:
            earliest += copies[index - 1].results
        if index > len(ahead):
            earliest.append(copies[index - len(ahead) - 1].wait)
        anchor = max([*earliest, inputs_end], key=where.__getitem__)
        if where[anchor] + 1 < where[copy.start]:
            move_after([copy.start, *copy.results], anchor)
            where = positions(graph)
    return _num_moved(graph, copies, before)


def _first_reader(copy: Transfer, graph: fx.Graph, where: dict[fx.Node, int]) -> fx.Node:
    users = [user for pick in copy.results for user in pick.users if user is not copy.wait]
    return min(users, key=where.__getitem__, default=graph.output_node())


def _num_moved(graph: fx.Graph, copies: list[Transfer], before: dict[fx.Node, int]) -> int:
    """Count copies whose start and wait no longer stand where they stood beside each other."""
    where = positions(graph)
    return sum(
        where[copy.wait] - where[copy.start] != before[copy.wait] - before[copy.start]
        or where[copy.start] != before[copy.start]
        for copy in copies
    )
