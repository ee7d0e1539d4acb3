"""The pass obeys the context, and only it."""

from __future__ import annotations

import dataclasses

import torch

from support.graphs import CONTEXT, TwoLayers, apply, captured
from torchloom import ops
from torchloom.graph import find, graph_text
from torchloom.ops.compute import product_of

X = torch.randn(4, 6)
aten = torch.ops.aten


def products(graph):
    return [found for found in map(product_of, graph.nodes) if found is not None]


def choosing(graph, *, only=None):
    keys = {product.key for product in products(graph)}
    chosen = tuple(sorted((key, "onednn") for key in keys if only is None or key == only))
    return dataclasses.replace(CONTEXT, kernels=chosen)


def whole_model():
    """Graphs of a model whose parameters stay whole, so that they run without ranks."""
    torch.manual_seed(3)
    return captured(TwoLayers(), [X], stage=0, threshold=10_000)


def test_every_chosen_product_is_replaced(golden) -> None:
    for kind in ("forward", "backward"):
        gm = captured(TwoLayers(), [X], ["zero3"])[kind]
        num_products = len(products(gm.graph))
        report = apply(gm, ["choose_kernels"], choosing(gm.graph))
        assert report.passes[0].num_edits == num_products == len(find(gm.graph, ops.matmul)) > 0
        golden(f"choose_kernels.{kind}", graph_text(gm.graph))


def test_no_choice_no_edit() -> None:
    gm = whole_model()["forward"]
    before = graph_text(gm.graph)
    assert apply(gm, ["choose_kernels"]).passes[0].num_edits == 0
    assert graph_text(gm.graph) == before


def test_only_what_was_chosen_is_replaced() -> None:
    gm = whole_model()["forward"]
    first = products(gm.graph)[0]
    context = choosing(gm.graph, only=first.key)
    assert apply(gm, ["choose_kernels"], context).passes[0].num_edits == 1
    assert len(products(gm.graph)) == 1


def test_a_second_run_changes_nothing() -> None:
    gm = whole_model()["backward"]
    context = choosing(gm.graph)
    assert apply(gm, ["choose_kernels"], context).passes[0].num_edits > 0
    assert apply(gm, ["choose_kernels"], context).passes[0].num_edits == 0


def test_products_keep_their_values() -> None:
    """Run a graph of products in all layouts, with what surrounds them, before and after."""

    def fn(x, w, v, bias):
        y = torch.addmm(bias, x, w.t())
        z = torch.mm(y.t(), v)
        return torch.mm(z, v.t()), torch.addmm(bias, x, w.t(), beta=2.0), y.relu()

    args = [torch.randn(6, 5), torch.randn(4, 5), torch.randn(6, 7), torch.randn(4)]
    gm = torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*args)
    expected = gm(*args)
    assert apply(gm, ["choose_kernels"], choosing(gm.graph)).passes[0].num_edits == 3
    assert len(find(gm.graph, aten.addmm.default)) == 1  # the scaled one is left alone
    for result, wanted in zip(gm(*args), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def test_reports_do_not_take_products_for_collectives() -> None:
    gm = whole_model()["forward"]
    report = apply(gm, ["choose_kernels"], choosing(gm.graph))
    assert not [name for name in report.collectives if "matmul" in name]
