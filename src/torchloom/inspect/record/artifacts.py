"""The graphs and the generated code of an entry, at every stage that torch logs."""

from __future__ import annotations

import re

from torchloom.inspect.heard import Row
from torchloom.inspect.record.kernels import parse_kernels
from torchloom.records import Artifact, Entry

GRAPHS = {
    "dynamo_output_graph": ("dynamo", "captured by Dynamo"),
    "before_pre_grad_graph": ("pre_grad", "before pre-grad passes"),
    "aot_joint_graph": ("joint", "joint graph"),
    "aot_forward_graph": ("forward", "forward"),
    "aot_backward_graph": ("backward", "backward"),
    "aot_inference_graph": ("inference", "inference"),
    "before_post_grad_graph": ("before_post_grad", "before post-grad passes"),
    "inductor_post_grad_graph": ("post_grad", "after post-grad passes"),
    "inductor_output_code": ("output_code", "generated code"),
    "fx_graph_runnable": ("runnable", "runnable repro"),
}
"""Kind and title of an artifact by the kind of the trace's row."""
_ONE_EACH_SIDE = ("output_code", "post_grad", "before_post_grad", "runnable")
"""Kinds that torch logs once for the forward graph and once for the backward graph."""
_GRAPH_ID = re.compile(r"^\s*# graph id: \d+\n?", re.M)


def add_graph(entry: Entry, row: Row) -> None:
    """Add a graph, or generated code with its kernels, to an entry.

    Args:
        entry: gets the artifact.
        row: of a kind in `GRAPHS`.
    """
    kind, title = GRAPHS[row.kind]
    text = _GRAPH_ID.sub("", row.payload or "")
    if kind in _ONE_EACH_SIDE:
        earlier = sum(a.kind == kind for a in entry.artifacts)
        side = ("forward", "backward")[earlier] if earlier < 2 else str(earlier)
        has_backward = any(a.kind in ("backward", "forward") for a in entry.artifacts)
        title = f"{title}, {side}" if has_backward else title
    entry.artifacts.append(
        Artifact(kind=kind, title=title, text=text, num_bytes=len(text.encode()))
    )
    if kind == "output_code":
        graphs = [a.text for a in entry.artifacts if a.kind == "post_grad"]
        entry.kernels += parse_kernels(text, graphs[-1] if graphs else "")
