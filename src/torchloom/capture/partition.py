"""Decides what forward keeps for backward, exactly as a plan's tags say: for joint graphs, and for calls of bodies.

The stock partitioner treats tags as bounds and minimises saved bytes between them. A plan has
chosen already, with the peak in view: every value of the forward half is tagged, and the walk below
finds which of them backward needs.

    before   r = region('a1b2', 3, [x, w])          region_backward('a1b2', 3, [x, r[1], r[2], grad])
    after    r = region('a1b2k77c0', 3, [x, w])     region_backward('a1b2k77c0', 3, [x, w, r[1], grad])

Forward and backward of the new body are those of the old one, split at another place: what its backward does
not get, it computes again. All that it may need of the calling graph is an operand of the call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch import aot as torch_partition
from torchloom._torch.tensors import fake_like
from torchloom.capture.hooks import Bodies
from torchloom.graph import args_of, draws, forward_nodes, is_view, value_of
from torchloom.ops.regions import Body, body_of, region, region_backward

_DROPPED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def partition_by_tags(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    is_clean: bool = False,
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward: a partitioner for AOTAutograd.

    A value of the forward half that backward reads is saved, unless its `recompute` tag drops it:
    then backward computes it from values that are saved. Backward also makes untagged views again, from
    the tensor that they view.

    Args:
        joint: the joint graph.
        joint_inputs: not used; AOTAutograd passes them.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: inputs that stay at one address, e.g. parameters.
        is_clean: whether dead and repeated nodes were removed before.

    Returns:
        The forward and the backward graph.
    """
    joint = torch_partition.prepare_joint(joint, is_clean=is_clean)
    saved = saved_values(joint.graph, num_fwd_outputs)
    return torch_partition.split_joint(
        joint,
        saved,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices or (),
        redraws=any(draws(node) and is_dropped(node) for node in forward_nodes(joint.graph)),
    )


def saved_values(joint: fx.Graph, num_fwd_outputs: int) -> list[fx.Node]:
    """Return the values that forward must hand to backward, in graph order."""
    forward = set(forward_nodes(joint))
    outputs = joint.output_node().args[0]
    waiting = [node for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node)]  # type: ignore[index]
    seen, saved = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            if not node.name.startswith("tangents"):
                saved.add(node)
            continue
        if node in forward and (torch_partition.is_symbol(node) or not is_dropped(node)):
            saved.add(node)
            continue
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                waiting.append(used)
    return [node for node in joint.nodes if node in saved]


def is_dropped(node: fx.Node) -> bool:
    """Say whether backward computes a value of the forward half again if it needs it."""
    tag = node.meta.get("recompute")
    if tag is None:
        return not isinstance(value_of(node), Tensor) or is_view(node)
    return tag in _DROPPED


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
