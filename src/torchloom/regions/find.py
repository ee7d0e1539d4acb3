"""Find equal parts of a captured graph: layers that follow upon each other.

    x1 = layer(x0, w0)   x2 = layer(x1, w1)   x3 = layer(x2, w2)        three calls of one form

Nodes get labels (`labels`), tandem repeats of labels are found, each is cut where fewest values
cross, and parts whose data flows in the same way have one form. Gathers and parameters stay outside.

Tandem repeats: a b c x y x y x y x y d        ->   begin 3, period 2, length 8

Source of the idea: a sequence has period p on [b, e) exactly if each label there equals the one p further
on; see Main and Lorentz, "An O(n log n) algorithm for finding all repetitions in a string", J. Algorithms 5
(1984). Captured graphs are short and their periods few, so periods are guessed from distances between equal
labels and then checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.bodies import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from torchloom._torch.modes import storage_id
from torchloom.regions.labels import (
    Contexts,
    is_outside,
    is_strange,
    is_weight,
    label,
    module_of_attr,
    open_contexts,
    signs_of,
    traced_value,
    value_text,
)

MIN_REPEATS = 4
"""Fewer equal layers are compiled faster than a body is handled."""
MIN_NODES = 4
"""A part with fewer operators is no layer; those of graphs within it count."""
_MOST_CUTS = 8
"""Places at which a stretch is cut on trial."""


@dataclass(frozen=True)
class Part:
    """One of several equal parts of a graph."""

    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    """Tensors that a call of it is given: values that it reads, those of the last use first."""
    sizes: tuple[fx.Node, ...]
    """Symbolic numbers that it is given as well."""
    results: tuple[fx.Node, ...]
    """Its values that others read."""
    contexts: Contexts
    """What is entered before the part and left behind it."""
    form: Any
    """Equal for parts that one body can stand for."""


@dataclass(frozen=True)
class Found:
    """Equal parts, and why others stay as they are."""

    groups: tuple[tuple[Part, ...], ...]
    reasons: tuple[str, ...]


def find_regions(
    graph: fx.Graph,
    min_repeats: int = MIN_REPEATS,
    why_not: Callable[[Part], str | None] | None = None,
) -> Found:
    """Return groups of equal parts, each in the order of the graph.

    Args:
        graph: from Dynamo, with values recorded on its nodes; not changed.
        min_repeats: smaller groups do not count.
        why_not: says why a part cannot be used, None if it can; by default, why it cannot be a call of a body.
    """
    nodes = [node for node in graph.nodes if not is_outside(node)]
    strange = next(filter(is_strange, nodes), None)
    if strange is not None:
        return Found((), (f"what %{strange.name} means for layers is not known",))
    numbers: dict[str, int] = {}
    texts = [label(node) for node in nodes]
    labels = [numbers.setdefault(text, len(numbers)) for text in texts]
    place = {node: index for index, node in enumerate(nodes)}
    contexts = open_contexts(graph)
    groups: list[tuple[Part, ...]] = []
    reasons: list[str] = []
    waiting = [(0, len(nodes))]
    while waiting:
        begin, end = waiting.pop()
        stretch = longest_stretch(labels, begin, end, min_repeats, 1)
        if stretch is None:
            continue
        found = _cut(
            _Labelled(nodes, labels, contexts), stretch, min_repeats, why_not or why_no_call
        )
        groups += found.groups
        reasons += found.reasons
        # A stretch may reach into what is before it and behind it: only its parts are taken.
        taken = [place[node] for group in found.groups for part in group for node in part.nodes]
        first, last = (min(taken), max(taken) + 1) if taken else (stretch.begin, stretch.end)
        waiting += [(begin, first), (last, end)]
    groups.sort(key=lambda group: place[group[0].nodes[0]])
    if not groups and not reasons:
        reasons += _differences(nodes, labels, min_repeats)
    return Found(tuple(groups), tuple(reasons))


def _differences(
    nodes: Sequence[fx.Node], labels: Sequence[int], min_repeats: int
) -> Iterator[str]:
    """Yield what keeps parts with the same operators from being equal, if there are any."""
    numbers: dict[object, int] = {}
    operators = [numbers.setdefault((node.op, node.target), len(numbers)) for node in nodes]
    stretch = longest_stretch(operators, 0, len(nodes), min_repeats, MIN_NODES)
    if stretch is None:
        return
    begin, end, period = stretch
    for at in range(begin, end - period):
        if labels[at] != labels[at + period]:
            pair = f"%{nodes[at].name} and %{nodes[at + period].name}"
            yield f"{_where(nodes, stretch)}: {pair} differ in arguments, shapes, dtypes or requires_grad"
            return


def _where(nodes: Sequence[fx.Node], stretch: Stretch) -> str:
    return f"{stretch.num_repeats} parts of {stretch.period} nodes from %{nodes[stretch.begin].name} on"


class _Labelled(NamedTuple):
    """The nodes of a graph that may be parts of layers."""

    nodes: Sequence[fx.Node]
    labels: Sequence[int]
    contexts: Mapping[fx.Node, Contexts]


def _num_operators(nodes: Sequence[fx.Node]) -> int:
    return sum(
        len(module_of_attr(node).graph.nodes) if node.op == "get_attr" else 1 for node in nodes
    )


def _cut(
    labelled: _Labelled,
    stretch: Stretch,
    min_repeats: int,
    why_not: Callable[[Part], str | None],
) -> Found:
    """Return the groups of the best cut of a stretch, or why no cut gives any."""
    nodes = labelled.nodes
    if _num_operators(nodes[stretch.begin : stretch.begin + stretch.period]) < MIN_NODES:
        return Found((), ())
    reason = ""
    for begin in _cuts(nodes, stretch, min_repeats):
        forms: defaultdict[Any, list[Part]] = defaultdict(list)
        for start in range(begin, stretch.end - stretch.period + 1, stretch.period):
            own = slice(start, start + stretch.period)
            part = _part(_Labelled(nodes[own], labelled.labels[own], labelled.contexts))
            forms[part.form].append(part)
        groups = [tuple(each) for each in forms.values() if len(each) >= min_repeats]
        fine = []
        for group in groups:
            problem = next(filter(None, map(why_not, group)), None)
            if problem is None:
                fine.append(group)
            else:
                reason = problem
        if fine:
            return Found(tuple(fine), ())
    reason = reason or "their data flows in different ways"
    return Found((), (f"{_where(nodes, stretch)}: {reason}",))


def _cuts(nodes: Sequence[fx.Node], stretch: Stretch, min_repeats: int) -> list[int]:
    """Return where parts may begin, those first at whose borders fewest values cross."""
    index_of = {node: i for i, node in enumerate(nodes)}
    begin, end, period = stretch
    # The period in the middle is as all but the first and the last are.
    middle = begin + (stretch.num_repeats // 2) * period
    crossing = [0] * period
    for index in range(begin, end):
        users = [index_of[user] for user in nodes[index].users if user in index_of]
        last = max(users, default=index)
        if any(user not in index_of for user in nodes[index].users):
            last = len(nodes)
        low, high = max(index + 1, middle), min(last, middle + period - 1)
        for place in range(low, high + 1):
            crossing[place - middle] += 1
    cuts = [
        (crossing[offset], -((end - begin - offset) // period), begin + offset)
        for offset in range(period)
        if (end - begin - offset) // period >= min_repeats
    ]
    return [at for _, _, at in sorted(cuts)[:_MOST_CUTS]]


def _part(own: _Labelled) -> Part:
    nodes, labels = own.nodes, own.labels
    offsets = {node: i for i, node in enumerate(nodes)}
    slots: dict[fx.Node, int] = {}
    flow = [
        offsets[used] if used in offsets else -1 - slots.setdefault(used, len(slots))
        for node in nodes
        for used in inputs_of(node)
    ]
    # In the order in which autograd comes to them.
    operands = tuple(used for used in reversed(slots) if isinstance(traced_value(used), Tensor))
    sizes = tuple(used for used in slots if not isinstance(traced_value(used), Tensor))
    results = [node for node in nodes if any(user not in offsets for user in node.users)]
    contexts = own.contexts[nodes[0]]
    form = (
        tuple(label(node) for node in contexts),
        tuple(labels),
        tuple(flow),
        tuple(value_text(traced_value(each)) for each in (*operands, *sizes)),
        tuple(is_weight(each) for each in operands),
        tuple(offsets[node] for node in results),
    )
    return Part(tuple(nodes), operands, sizes, tuple(results), contexts, form)


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return what a node reads, once for each place."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def why_modes_leak(part: Part) -> str | None:
    """Say how a part leaves autocast, or the gradient mode, other than it finds it; None if it does not."""
    nodes = part.nodes
    entered = {node for node in nodes if node.target is ENTER_AUTOCAST}
    left = {node.args[0] for node in nodes if node.target is EXIT_AUTOCAST}
    modes = [node.args for node in nodes if node.target is SET_GRAD]
    last = nodes[0].graph.find_nodes(op="call_function", target=SET_GRAD)[-1:]
    if entered == left and (not modes or modes[-1] == last[0].args):
        return None
    return "autocast or a gradient mode begins or ends within a part"


def why_no_call(part: Part) -> str | None:
    """Return why a part cannot be a call of a body, None if it can."""
    if leak := why_modes_leak(part):
        return leak
    strange = [node for node in part.results if not isinstance(traced_value(node), Tensor)]
    if strange:
        return f"%{strange[0].name}, which is no tensor, is read behind its part"
    # Calls hand over memory alone.
    signed = [node for node in (*part.operands, *part.results) if signs_of(traced_value(node))]
    if signed:
        return f"the conjugate or the negative of %{signed[0].name} is taken where it is read"
    if not part.results:
        return "nothing is read behind a part"
    others = [
        node for node in part.sizes if not isinstance(traced_value(node), (int, torch.SymInt))
    ]
    if others:
        return f"it reads %{others[0].name}, which is neither a tensor nor a size"
    return _shared_memory(part)


def _shared_memory(part: Part) -> str | None:
    read = {storage_id(traced_value(node)) for node in part.operands}
    seen: set[int | None] = set()
    for node in part.results:
        storage = storage_id(traced_value(node))
        if storage is not None and storage in read:
            return f"its result %{node.name} is a view of what it reads"
        if storage is not None and storage in seen:
            return f"its result %{node.name} is a view of another result"
        seen.add(storage)
    return None


_MOST_KINDS = 8
"""Layers of a period at most: models alternate between a few kinds (Gemma 3: five and one)."""
_MOST_PERIODS = 32
"""Periods that are checked; each check is a walk over the sequence."""


class Stretch(NamedTuple):
    """A part of the sequence on which each label equals the one a period further on."""

    begin: int
    end: int
    period: int

    @property
    def num_repeats(self) -> int:
        """How many whole periods it holds."""
        return (self.end - self.begin) // self.period


def longest_stretch(
    labels: Sequence[int], begin: int, end: int, min_repeats: int, min_period: int
) -> Stretch | None:
    """Return the stretch of a part of a sequence whose repeats cover most, None if nothing repeats.

    Args:
        labels: the sequence.
        begin: where the part begins.
        end: where it ends.
        min_repeats: how often a period has to follow upon itself.
        min_period: shorter periods do not count.
    """
    if end - begin < min_repeats * min_period:
        return None
    return max(
        _candidates(labels, begin, end, min_repeats, min_period),
        key=lambda each: (each.num_repeats * each.period, -each.period, -each.begin),
        default=None,
    )


def _candidates(
    labels: Sequence[int], begin: int, end: int, min_repeats: int, min_period: int
) -> Iterator[Stretch]:
    for period in _periods(labels, begin, end, min_period):
        start = None
        for index in range(begin, end - period + 1):
            equal = index < end - period and labels[index] == labels[index + period]
            if equal and start is None:
                start = index
            elif not equal and start is not None:
                stretch = Stretch(start, index + period, period)
                if stretch.num_repeats >= min_repeats:
                    yield stretch
                start = None


def _periods(labels: Sequence[int], begin: int, end: int, min_period: int) -> list[int]:
    """Return distances at which equal labels stand, those first that are frequent among rare labels.

    A layer holds some operators many times, at all distances, and others once, at the distance of layers.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(begin, end):
        places[labels[index]].append(index)
    votes: Counter[int] = Counter()
    for at in places.values():
        for apart in range(1, _MOST_KINDS + 1):
            for first, second in zip(at, at[apart:], strict=False):
                votes[second - first] += _VOTES // (len(at) * len(at))
    counted = [(period, count) for period, count in votes.items() if period >= min_period]
    counted.sort(key=lambda each: (-each[1], each[0]))
    return [period for period, _ in counted[:_MOST_PERIODS]]


_VOTES = 1 << 40
