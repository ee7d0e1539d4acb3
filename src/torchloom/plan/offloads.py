"""Which activations may wait in host memory: a few sets, from little to all that may wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchloom.costs import Device
from torchloom.plan.form import GraphForm, Offload, OffloadedValue
from torchloom.plan.frontier import FrontierPoint

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of what a link can carry while compute runs: how much is offloaded."""
_CHEAP = 0.25
"""What takes less than this part of a copy's time to compute again is never copied."""


def offload_sets(base: GraphForm, device: Device) -> Iterator[Offload]:
    """Yield sets of values to offload, and the values to compute again from them.

    Args:
        base: the graph as it was captured.
        device: whose links carry them.
    """
    model = base.model
    bytes_per_s = min(device.d2h_bytes_per_s, device.h2d_bytes_per_s)
    cheap = _last_below(base.frontier.points, _CHEAP * 1e6 / bytes_per_s)
    waiting = []
    for index, size in base.handed_over(cheap).items():
        node = model.nodes[index]
        if size >= base.problem.offload_min_bytes and base.movable.get(node) is node:
            waiting.append(OffloadedValue(node, size, base.cost_us[index]))
    # What is dear to make again for its size; of equals the first ones wait longest.
    waiting.sort(key=lambda each: -each.cost_us / max(each.num_bytes, 1))
    halves_us = [0.0, 0.0]
    for inside, us in zip(model.in_forward, base.cost_us, strict=True):
        halves_us[inside] += us
    capacity_bytes = bytes_per_s * min(halves_us) / 1e6
    limits_bytes = [*(share * capacity_bytes for share in _SHARES), float("inf")]
    counts = {_count_within(waiting, limit_bytes) for limit_bytes in limits_bytes} - {0}
    for count in sorted(counts):
        yield Offload(tuple(waiting[:count]), base.names(cheap))


def _last_below(points: Iterable[FrontierPoint], us_per_byte: float) -> FrontierPoint:
    """Return the last point from fast to small that costs less per freed byte than a price."""
    chosen: FrontierPoint | None = None
    for point in points:
        if chosen is not None:
            freed_bytes = chosen.peak_bytes - point.peak_bytes
            if point.extra_us - chosen.extra_us > us_per_byte * freed_bytes:
                break
        chosen = point
    assert chosen is not None
    return chosen


def _count_within(waiting: Sequence[OffloadedValue], limit_bytes: float) -> int:
    used_bytes = 0
    for count, each in enumerate(waiting):
        used_bytes += each.num_bytes
        if used_bytes > limit_bytes:
            return count
    return len(waiting)
