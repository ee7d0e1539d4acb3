"""Which activations may wait in host memory: a few sets, from little to all that may move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchloom.costs import Device
from torchloom.graph import movable
from torchloom.plan.field import Field, Move, Swapped
from torchloom.plan.frontier import Point

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of what a link can carry while compute runs: how much moves."""
_CHEAP = 0.25
"""What takes less than this part of a copy's time to compute again is never copied."""


def moves_of(base: Field, device: Device) -> Iterator[Move]:
    """Yield sets of values to offload, and the values to compute again from them.

    Args:
        base: the graph as it was captured.
        device: whose links carry them.
    """
    model = base.model
    rate = min(device.d2h_bytes_per_s, device.h2d_bytes_per_s)
    again = _cheaper(base.frontier.points, _CHEAP * 1e6 / rate)
    owner = movable(base.task.joint)
    waiting = []
    for index, size in base.handed_over(again).items():
        node = model.nodes[index]
        if size >= base.task.swap_min_bytes and owner.get(node) is node:
            waiting.append(Swapped(node, size, base.cost_us[index]))
    # What is dear to make again for its size; of equals the first ones wait longest.
    waiting.sort(key=lambda each: -each.cost_us / max(each.num_bytes, 1))
    halves = [0.0, 0.0]
    for inside, us in zip(model.in_forward, base.cost_us, strict=True):
        halves[inside] += us
    capacity = rate * min(halves) / 1e6
    limits = [*(share * capacity for share in _SHARES), float("inf")]
    sizes = {_count_within(waiting, limit) for limit in limits} - {0}
    for size in sorted(sizes):
        yield Move(tuple(waiting[:size]), base.names(again))


def _cheaper(points: Iterable[Point], price: float) -> Point:
    """Return the last plan on the way from fast to small that costs less per byte than a price."""
    chosen: Point | None = None
    for point in points:
        if chosen is not None:
            freed = chosen.peak_bytes - point.peak_bytes
            if point.extra_us - chosen.extra_us > price * freed:
                break
        chosen = point
    assert chosen is not None
    return chosen


def _count_within(waiting: Sequence[Swapped], limit: float) -> int:
    used = 0
    for count, each in enumerate(waiting):
        used += each.num_bytes
        if used > limit:
            return count
    return len(waiting)
