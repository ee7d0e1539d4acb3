"""Start gathers ahead of their use and wait at the first use; wait for reductions later.

    before   start a, wait a, use a, start b, wait b, use b
    after    start a, start b, wait a, use a, wait b, use b

A gather starts as early as `max_bytes` (the plan's, or else its own) allows. A reduction's wait moves to its
first reader, or to where gradients in flight would exceed half of that bound. Without a plan, `uses_ahead` lets transfers
of whole uses overlap compute beyond that bound: a call of a body of layers needs all of its weights at once, and what is
smaller than them hides nothing. Where ranks share memory and there is no budget, waits move further as long as the peak
does not rise. Changes no values.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from torchloom.graph import PassContext, live_bytes, move_before, positions, source_of
from torchloom.ops.match import Transfer, gathers, reductions

aten = torch.ops.aten
_VIEWS = frozenset({aten.slice.Tensor, aten.view.default})


class _Need(NamedTuple):
    """A gather, the views of its results, and the first node that reads its data."""

    transfer: Transfer
    views: list[fx.Node]
    use: fx.Node


def prefetch(
    gm: fx.GraphModule, ctx: PassContext, *, max_bytes: int = 16 << 20, uses_ahead: int = 0
) -> int:
    """Move starts up and waits down; return how many transfers moved.

    Args:
        gm: a lowered graph with transfers; edited in place.
        ctx: its plan may replace the bound (`choices.prefetch_bytes`).
        max_bytes: weights that are gathered ahead of their use hold at most this many bytes; 0 gathers none ahead.
        uses_ahead: of how many operators or calls of bodies the weights are gathered ahead in any case.
    """
    planned = None if ctx.choices is None else ctx.choices.prefetch_bytes
    limit_bytes = max_bytes if planned is None else planned
    uses = uses_ahead if planned is None and max_bytes else 0
    num_moved = _hoist_gathers(gm.graph, limit_bytes, uses)
    num_moved += _sink_waits(gm.graph, limit_bytes // 2, by_calls=uses > 0)
    # In shared memory, a later wait lets ranks wait less for each other. Over a network it gains nothing
    # beyond the bound above, and under a memory budget the plan has other uses for the bytes.
    if ctx.shared_weights is not None and ctx.memory_budget_bytes is None:
        num_moved += _sink_for_free(gm.graph)
    return num_moved


def _hoist_gathers(graph: fx.Graph, limit_bytes: int, uses_ahead: int) -> int:
    where = positions(graph)
    begin = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    needs = [_need(transfer, where) for transfer in gathers(graph)]
    needs.sort(key=lambda need: where[need.use])
    for need in needs:
        move_before([need.transfer.wait, *need.views], need.use)
    firsts = sorted({need.use: i for i, need in reversed(list(enumerate(needs)))}.values())
    num_moved = 0
    for index, need in enumerate(needs):
        least = bisect.bisect_right(firsts, index) - 1 - uses_ahead
        if least < 0 and all(where[node] < where[begin] for node in need.transfer.inputs):
            # What is used first has only the beginning of the graph ahead of it.
            if need.transfer.start is not begin:
                move_before([need.transfer.start, *need.transfer.results], begin)
                num_moved += 1
            continue
        at_least = firsts[max(0, least)] if uses_ahead else index
        anchor = needs[min(at_least, _anchor(needs, index, limit_bytes))]
        is_ready = all(where[node] < where[anchor.use] for node in need.transfer.inputs)
        if anchor is not need and is_ready:
            # Before the anchor's wait, so that this transfer runs while that one is waited for.
            move_before([need.transfer.start, *need.transfer.results], anchor.transfer.wait)
            num_moved += 1
    return num_moved


def _need(transfer: Transfer, where: dict[fx.Node, int]) -> _Need:
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    chain = list(transfer.results)
    for node in chain:  # grows while it is walked
        for user in node.users:
            if user.target in _VIEWS:
                views.append(user)
                chain.append(user)
            elif user is not transfer.wait:
                readers.append(user)
    use = min(readers, key=where.__getitem__, default=transfer.wait)
    return _Need(transfer, sorted(views, key=where.__getitem__), use)


def _anchor(needs: list[_Need], index: int, limit_bytes: int) -> int:
    """Return the earliest gather before whose use gather `index` may already be under way."""
    pending_bytes = needs[index].transfer.result_bytes
    for earlier in range(index - 1, -1, -1):
        pending_bytes += needs[earlier].transfer.result_bytes
        if pending_bytes > limit_bytes:
            return earlier + 1
    return 0


def _sink_waits(graph: fx.Graph, limit_bytes: int, *, by_calls: bool) -> int:
    where = positions(graph)
    in_flight: list[Transfer] = []
    num_moved = 0
    for transfer in reductions(graph):
        used_bytes = transfer.input_bytes + sum(other.input_bytes for other in in_flight)
        while in_flight and used_bytes > limit_bytes:
            if by_calls and _source(in_flight[0], where) is _source(transfer, where):
                break  # one call of a body made them all
            used_bytes -= in_flight[0].input_bytes
            num_moved += _move_wait(in_flight.pop(0), transfer.start, where)
        in_flight.append(transfer)
    output = graph.output_node()
    return num_moved + sum(_move_wait(transfer, output, where) for transfer in in_flight)


def _source(transfer: Transfer, where: dict[fx.Node, int]) -> fx.Node:
    """Return the last node that computes what a transfer sends."""
    return max(map(source_of, transfer.inputs), key=where.__getitem__)


def _sink_for_free(graph: fx.Graph) -> int:
    """Move waits of reductions further down, as long as the memory they hold does not raise the peak."""
    nodes, where = list(graph.nodes), positions(graph)
    alive = list(live_bytes(graph))
    peak_bytes, moved = max(alive), set[fx.Node]()
    # The last ones first: what an earlier one would hold is then held beside them.
    for transfer in reversed(reductions(graph)):
        now = where[transfer.wait]
        end = min(where[reader] for reader in _readers(transfer))
        stop = now + 1
        while stop < end and alive[stop] + transfer.input_bytes <= peak_bytes:
            alive[stop] += transfer.input_bytes
            stop += 1
        if stop > now + 1:
            anchor = next(node for node in nodes[stop:] if node not in moved)
            move_before([transfer.wait], anchor)
            moved.add(transfer.wait)
    return len(moved)


def _readers(transfer: Transfer) -> Iterator[fx.Node]:
    readers = (user for pick in transfer.results for user in pick.users)
    return (reader for reader in readers if reader is not transfer.wait)


def _move_wait(transfer: Transfer, latest: fx.Node, where: dict[fx.Node, int]) -> int:
    """Move a wait down to its first reader, but not beyond `latest`; return 1 if it moved."""
    anchor = min(_readers(transfer), key=where.__getitem__)
    if where[latest] < where[anchor]:
        anchor = latest
    if where[anchor] <= where[transfer.wait] + 1:
        return 0
    move_before([transfer.wait], anchor)
    return 1
