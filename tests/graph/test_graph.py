"""The graph toolbox: text, sizes, edits."""

from __future__ import annotations

import torch
from torch import fx

from torchloom.graph import call, find, graph_text, move_before, nbytes, op_counts, replace

aten = torch.ops.aten


def small() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 3)
    y = call(graph, aten.relu.default, (x,))
    z = call(graph, aten.add.Tensor, (y, x))
    graph.output((z,))
    return graph


def test_text() -> None:
    assert graph_text(small()) == (
        "%x : f32[2, 3] = placeholder\n"
        "%relu_default : f32[2, 3] = aten.relu(%x)\n"
        "%add_tensor : f32[2, 3] = aten.add.Tensor(%relu_default, %x)\n"
        "return (%add_tensor)\n"
    )


def test_sizes_and_counts() -> None:
    graph = small()
    assert nbytes(find(graph, aten.relu.default)[0]) == 24
    assert op_counts(graph) == {"aten.add.Tensor": 1, "aten.relu": 1}


def test_replace_and_move() -> None:
    graph = small()
    (relu,) = find(graph, aten.relu.default)
    with graph.inserting_before(relu):
        sine = call(graph, aten.sin.default, relu.args)
    replace(relu, sine)
    (add,) = find(graph, aten.add.Tensor)
    with graph.inserting_before(add):
        cosine = call(graph, aten.cos.default, sine.args)
    move_before([cosine], sine)
    graph.lint()
    assert [n.name for n in graph.nodes][1:3] == [cosine.name, sine.name]
