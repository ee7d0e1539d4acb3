"""Let calls of one body keep different values for backward, as a plan says.

    before   r = region('a1b2', 3, [x, w])          region_backward('a1b2', 3, [x, r[1], r[2], grad])
    after    r = region('a1b2k77c0', 3, [x, w])     region_backward('a1b2k77c0', 3, [x, w, r[1], grad])

Forward and backward of the new body are those of the old one, split at another place: what its backward does
not get, it computes again. All that it may need of the calling graph is an operand of the call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from torchloom._torch.tensors import fake_like
from torchloom.capture.hooks import Bodies
from torchloom.graph import args_of
from torchloom.ops.regions import Body, body_of, region, region_backward


def recompute_in_calls(
    joint: fx.Graph, names: Mapping[int, frozenset[str]], bodies: Bodies
) -> None:
    """Give calls of a joint graph the bodies whose backwards compute values again.

    Args:
        joint: edited in place.
        names: by the number of a call, values of its body's joint graph.
        bodies: those that calls of this graph may name; extended.
    """
    backwards = {args_of(n)[1]: n for n in joint.nodes if n.target is region_backward}
    for call in joint.find_nodes(op="call_function", target=region):
        name, number, *_ = args_of(call)
        backward = backwards.get(number)
        if backward is None:
            continue
        body = body_of(name).recomputing(names.get(number, frozenset()))
        if body.name != name:
            bodies[body.name] = body
            _call_instead(joint, call, backward, body)
    joint.lint()


def _call_instead(joint: fx.Graph, call: fx.Node, backward: fx.Node, body: Body) -> None:
    _, number, operands, sizes, trains = args_of(call)
    results = _results(joint, call, body)
    num_tangents = sum(each is not None for each in body.tangents)
    given = args_of(backward)[2]
    kept = (
        *(operands[index] for index in body.kept_operands),
        *(results[index] for index in body.kept_results),
        *results[body.num_results :],
        *given[len(given) - num_tangents :],
    )
    backward.args = (body.name, number, list(kept), args_of(backward)[3])
    call.args = (body.name, number, operands, sizes, trains)
    for pick in list(call.users):
        if not pick.users:
            joint.erase_node(pick)


def _results(joint: fx.Graph, call: fx.Node, body: Body) -> list[fx.Node]:
    """Return what a call returns for a body, its results as they were and new values that backward reads."""
    picks: dict[Any, fx.Node] = {pick.args[1]: pick for pick in call.users}
    kept = [fake_like(each) for each in body.forward_values(trains=True)[body.num_results :]]
    values = [*call.meta["val"][: body.num_results], *kept]
    call.meta = {**call.meta, "val": values}
    found = []
    after = call
    for index, value in enumerate(values):
        pick = picks.get(index) if index < body.num_results else None
        if pick is None:
            with joint.inserting_after(after):
                pick = joint.call_function(operator.getitem, (call, index))
            pick.meta = {**call.meta, "val": value}
            after = pick
        found.append(pick)
    return found
