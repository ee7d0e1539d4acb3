"""The stage passes: what is kept, what is gathered again, what is narrowed."""

from __future__ import annotations

import pytest
import torch

from support.graphs import Tied, TwoLayers, apply, captured
from torchloom import ops
from torchloom.graph import find, graph_text

X = torch.randn(4, 6)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_tags(stage: str, golden) -> None:
    golden(f"{stage}.two_layers", graph_text(captured(TwoLayers(), [X], [stage])["joint"].graph))


def test_zero3_gathers_again_what_backward_needs() -> None:
    graphs = captured(TwoLayers(), [X], ["zero3"])
    assert len(find(graphs["forward"].graph, ops.gather)) == 2
    # The first layer's weight is not needed in backward: its input needs no gradient.
    again = find(graphs["backward"].graph, ops.gather)
    assert [node.args[-1] for node in again] == ["second.weight"]


class Autocast(TwoLayers):
    """Weights are cast after they were gathered."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_zero3_saves_no_cast_weight() -> None:
    graphs = captured(Autocast(), [X], ["zero3"])
    saved = graphs["forward"].graph.output_node().args[0]
    full = {(8, 6), (6, 8), (5, 8), (8, 5)}
    assert not [n for n in saved if tuple(n.meta["val"].shape) in full]
    assert len(find(graphs["backward"].graph, ops.gather)) == 1


def test_zero1_narrows_sliced_parameters_only(golden) -> None:
    joint = captured(TwoLayers(), [X], stage=1)["joint"]
    options = {"zero1": {"params": ("first.weight", "second.weight")}}
    assert apply(joint, ["zero1"], options=options).passes[0].num_edits == 2
    golden("zero1.two_layers", graph_text(joint.graph))
    assert apply(joint, ["zero1"], options=options).passes[0].num_edits == 0


def test_dedupe_gathers_tied(golden) -> None:
    joint = captured(Tied(), [torch.arange(10)])["joint"]
    before = {op: len(find(joint.graph, op)) for op in (ops.gather, ops.reduce)}
    assert before == {ops.gather: 2, ops.reduce: 2}
    assert apply(joint, ["dedupe_gathers"]).passes[0].num_edits == 2
    golden("dedupe_gathers.tied", graph_text(joint.graph))


def test_elide_copies(golden) -> None:
    joint = captured(TwoLayers(), [X])["joint"]
    assert apply(joint, ["elide_copies"]).passes[0].num_edits == 1
    golden("elide_copies.two_layers", graph_text(joint.graph))
    assert apply(joint, ["elide_copies"]).passes[0].num_edits == 0
