"""The fastest plan of a joint graph within a budget, over all that can be done about its values.

    recompute   from the frontier: the fastest of its plans that fits as it will run
    offload     the values that are dearest to compute again wait on the host, as many as the link
                can carry beside compute, and fewer, and more; each with a frontier of its own
    residents   weights that stay gathered in the room that is left, or that more recomputing makes
    pieces      of parameters that stay on the device, and are not reloaded, in such room
    states      of the optimizer, that stay on the device in the room that is left, or is made
    depth       how far ahead weights are gathered

Each candidate is tried on copies of the graphs as later passes leave them: its peak is exact, its
time is that of a timeline over compute, network and links. Memory that is cheaper elsewhere goes
there: what counts is the time of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchloom.graph import movable
from torchloom.plan.bound import least_added_us
from torchloom.plan.costs import CostTable
from torchloom.plan.field import Field, Fields, Move, Swapped, field_of
from torchloom.plan.found import Found, better
from torchloom.plan.frontier import Frontier, Point
from torchloom.plan.memory import WorkspaceTable
from torchloom.plan.model import GraphPlan
from torchloom.plan.states import StateCosts
from torchloom.plan.task import Beside, Outcome, Task

_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Of what a link can carry while compute runs: how much is offloaded in a candidate."""
_CHEAP = 0.25
"""What takes less than this part of a copy's time to compute again is never copied."""
_SHARES_BESIDE = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of all weights: how many stay gathered in a candidate. Of all pieces: how many on the device."""


@dataclass
class Search:
    """Searches one joint graph.

    Args:
        costs: times.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        budget_bytes: what forward, backward and residents may take; None for no bound.
        offset_bytes: what a compiler's code is known to need beyond its graphs.
        given: what lives on because of other graphs.
        room_beside: what may live on beside all peaks at most; None for no bound.
        fields: frontiers that were searched before.
        micro_steps: runs of the graph per optimizer step.
        states: what room is worth to optimizer states that otherwise wait on the host; None where
            they stay or the budget has no bound.
    """

    costs: CostTable
    workspaces: WorkspaceTable
    budget_bytes: int | None
    offset_bytes: int = 0
    given: Beside = field(default_factory=Beside)
    room_beside: int | None = None
    fields: Fields = field(default_factory=Fields)
    micro_steps: int = 1
    states: StateCosts | None = None
    num_outcomes: int = 0
    """How many candidates were tried on copies of the graphs."""

    def run(self, task: Task, digest: str) -> GraphPlan:
        """Return the plan of the best candidate; it may not fit if none does."""
        base = self._field(task)
        best = self._recomputing(base)
        spends = best.point.extra_us > 0 or best.states_us > 0
        if task.swap is not None and (not best.fits or spends):
            for move in self._moves(base):
                best = better(best, self._recomputing(base.moved(move, self._made)))
        if task.verify is not None:
            for depth in (None, *best.field.task.depths):
                best = self._with_weights(best, depth)
            best = self._with_pieces(best)
        bound_us = least_added_us(best, base, self.costs, self.states, self.micro_steps)
        return best.plan(digest, task, self.budget_bytes, bound_us)

    def _field(self, task: Task) -> Field:
        found = self.fields.get(task, self.costs)
        if found is None:
            found = self._made(task)
            self.fields.put(found, self.costs)
        return found

    def _made(self, task: Task, move: Move | None = None) -> Field:
        return field_of(task, self.costs, self.workspaces, move)

    def _allowed(self, beside: Beside) -> int | None:
        if self.budget_bytes is None:
            return None
        return self.budget_bytes - self.offset_bytes - beside.num_bytes

    def _recomputing(
        self,
        among: Field,
        beside: Beside | None = None,
        depth: int | None = None,
    ) -> Found:
        """Return the fastest plan of a frontier that fits as it will run, the smallest if none does.

        Passes behind the split change peaks little and in the same direction for all points, so the
        first one that fits is found by halving. A smaller one may leave room for optimizer states
        that is worth more than what it computes again.
        """
        beside = self.given if beside is None else beside
        points, allowed = among.frontier.points, self._allowed(beside)
        outcomes: dict[int, Outcome] = {}

        def peak_of(at: int) -> int:
            if at not in outcomes:
                self.num_outcomes += 1
                trial = beside.trial(among.names(points[at]), depth)
                outcomes[at] = among.outcome(points[at], trial)
            return outcomes[at].peak_bytes

        def found(at: int) -> Found:
            least = min(each.peak_bytes for each in outcomes.values())
            states_us = self._states_us(allowed, outcomes[at].peak_bytes, beside)
            return Found(among, at, outcomes[at], allowed, beside, depth, least, states_us)

        fastest_bytes = peak_of(0)
        if allowed is None:
            return found(0)
        if fastest_bytes > allowed:
            low, high = 0, len(points) - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if peak_of(middle) <= allowed else (middle, high)
            peak_of(high)
        fitting = [at for at, each in outcomes.items() if each.peak_bytes <= allowed]
        if not fitting:
            return found(min(outcomes, key=peak_of))
        first = min(fitting)
        more = points[first].peak_bytes - peak_of(first)  # passes behind the split took this away

        def expected_us(at: int) -> float:
            peak_bytes = points[at].peak_bytes - more
            return points[at].extra_us + self._states_us(allowed, peak_bytes, beside)

        roomy = min(range(first, len(points)), key=expected_us)
        if roomy == first or peak_of(roomy) > allowed:
            return found(first)
        return better(found(first), found(roomy))

    def _states_us(self, allowed: int | None, peak_bytes: int, beside: Beside) -> float:
        if self.states is None or allowed is None:
            return 0.0
        return self.states.us(allowed - peak_bytes, beside)

    def _moves(self, base: Field) -> Iterator[Move]:
        """Yield sets of values to offload, and the values to compute again from them."""
        model, device = base.model, self.costs.device
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

    def _with_weights(self, best: Found, depth: int | None) -> Found:
        """Keep weights gathered, and gather others as far ahead as `depth`, where that is faster.

        Room for them is what is left, or what more recomputing makes.
        """
        weights, most = best.field.task.weights, _most_outcomes(len(best.field.model.nodes))
        # A small gather costs more time for its bytes than a big one: latency.
        order = sorted(weights.keys() - self.given.weights.keys(), key=lambda w: (weights[w], w))
        for count in _counts(order, weights):
            chosen = {name: weights[name] for name in order[:count]}
            is_base = depth is None and not count
            is_idle = depth is not None and count == len(order)  # nothing is left to prefetch
            if not (is_base or is_idle or self.num_outcomes >= most):
                best = self._with(best, self.given.joined(Beside(weights=chosen)), depth)
        return best

    def _with_pieces(self, best: Found) -> Found:
        """Let pieces of parameters stay on the device where that is faster."""
        pieces, most = best.field.task.pieces, _most_outcomes(len(best.field.model.nodes))
        before, depth = best.beside, best.prefetch_bytes
        # Of a weight that stays gathered the piece is read once in a step: those come last.
        order = sorted(
            pieces.keys() - self.given.pieces.keys(),
            key=lambda name: (name in before.weights, pieces[name], name),
        )
        for count in _counts(order, pieces):
            chosen = {name: pieces[name] for name in order[:count]}
            if count and self.num_outcomes < most:
                best = self._with(best, before.joined(Beside(pieces=chosen)), depth)
        return best

    def _with(self, best: Found, beside: Beside, depth: int | None) -> Found:
        """Return the best plan with something living on beside it, or the one before."""
        if self.room_beside is not None and beside.num_bytes > self.room_beside:
            return best
        among = best.field
        if best.fits and _least_us(among.frontier, self._allowed(beside)) >= best.added_us:
            return best  # the room would cost more than could be gained
        return better(best, self._recomputing(among, beside, depth))


def _most_outcomes(num_nodes: int) -> int:
    """Return how many candidates to try on copies: fewer of large graphs, to stay within seconds."""
    # Trying one takes about 0.7 ms for each node.
    return max(8, min(200, 9_000 // max(num_nodes, 1)))


def _least_us(found: Frontier, allowed: int | None) -> float:
    """Return the time of the fastest plan within a bound, before later passes add to its peak."""
    if allowed is None:
        return found.points[0].extra_us
    point = found.within(allowed)
    return float("inf") if point is None else point.extra_us


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


def _count_within(waiting: list[Swapped], limit: float) -> int:
    used = 0
    for count, each in enumerate(waiting):
        used += each.num_bytes
        if used > limit:
            return count
    return len(waiting)


def _counts(order: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Return how many of the first names to try: shares of all their bytes."""
    total = sum(sizes[name] for name in order)
    return sorted({len(list(_within(order, sizes, share * total))) for share in _SHARES_BESIDE})


def _within(order: Iterable[str], sizes: Mapping[str, int], limit: float) -> Iterator[str]:
    used = 0
    for name in order:
        used += sizes[name]
        if used > limit * (1 + 1e-9):
            return
        yield name
