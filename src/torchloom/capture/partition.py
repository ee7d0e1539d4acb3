"""Splitting a joint graph exactly as its tags say.

The stock partitioner treats tags as bounds and minimises saved bytes between them. A plan has
chosen already, with the peak in view: every value of the forward half is tagged, and the walk below
finds which of them backward needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom._torch import aot as torch_partition
from torchloom.graph import draws, forward_nodes, is_view, value_of

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
