"""How a value of one graph is found in another of the same operators with other sizes.

Names of nodes will not do: where sizes are symbols, what computes sizes takes names as well, and the
`add` of one graph is the `add_1` of the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import Tensor, fx

from torchloom.errors import PlanError
from torchloom.graph import value_of
from torchloom.plan.model import GraphPlan


def op_of(node: fx.Node) -> str:
    """Return how plans call the operator of a node."""
    return str(node.target).removeprefix("aten.")


def places_of(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Return by name which call of which operator makes a tensor or several, counted from 0."""
    num_calls, found = Counter[str](), dict[str, tuple[str, int]]()
    for node in graph.nodes:
        if node.op == "call_function" and _makes_tensors(value_of(node)):
            op = op_of(node)
            found[node.name] = op, num_calls[op]
            num_calls[op] += 1
    return found


def _makes_tensors(value: object) -> bool:
    """Say whether a value holds tensors, as that of attention operators, which also return what backward needs."""
    if isinstance(value, (tuple, list)):
        return any(map(_makes_tensors, value))
    return isinstance(value, Tensor)


def moved_to(plan: GraphPlan, graph: fx.Graph) -> GraphPlan:
    """Return a plan with the names that its values have in another graph.

    Raises:
        PlanError: a value is not there.
    """
    names = {place: name for name, place in places_of(graph).items()}
    known: dict[str, str] = {}
    for each in plan.decisions:
        name = names.get((each.op, each.place))
        if name is None:
            raise PlanError(f"the graph makes no value like {each.value!r} of the plan")
        known[each.value] = name
    if lacking := sorted(plan.again - known.keys()):
        raise PlanError(f"the plan does not say which value is {lacking[0]!r}")
    return replace(
        plan,
        decisions=tuple(replace(each, value=known[each.value]) for each in plan.decisions),
        again=frozenset(known[name] for name in plan.again),
    )
