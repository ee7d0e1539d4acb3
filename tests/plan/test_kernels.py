"""Finding products without data, measuring them, choosing among what was measured."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchloom.runtime  # noqa: F401  binds the operators
from torchloom._torch.aot import aot_compile, boxed
from torchloom._torch.onednn import has_onednn_linear
from torchloom._torch.partition import min_cut_partition
from torchloom.ops.compute import Product, product_of
from torchloom.plan.costs import CostTable, KernelChooser, kernels, measure_products
from torchloom.plan.costs.kernels import MARGIN, available_kernels, fastest
from torchloom.plan.costs.products import find_products

ONE = Product(6, 5, 4, "n", "t", False)
TWO = Product(8, 5, 4, "t", "n", True)

needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    return tmp_path


class Net(nn.Module):
    """Products with and without bias, of odd shapes, one under checkpointing, one with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, ids):
        x = self.table(ids)
        x = x + checkpoint(lambda y: self.second(F.gelu(self.first(y))), x, use_reentrant=False)
        return self.frozen(F.dropout(x, 0.3)).square().mean() + F.cross_entropy(
            (x @ self.table.weight.t()).flatten(0, 1), ids.flatten()
        )


def lowered_products(model, *inputs, dynamic=None):
    """Compile and run a model; return products found without data, and those of lowered graphs."""
    found, lowered = [], []

    def backend(gm, example_inputs):
        found.extend(find_products(gm, example_inputs))

        def compiler(graph_module, _):
            lowered.extend(p for p in map(product_of, graph_module.graph.nodes) if p is not None)
            return boxed(graph_module.forward)

        return aot_compile(
            gm,
            example_inputs,
            forward=compiler,
            backward=compiler,
            partition=min_cut_partition,
            inference=compiler,
        )

    result = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    if result.requires_grad:
        result.backward()
    return found, lowered


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_products_are_found_without_data(dynamic) -> None:
    ids = torch.randint(0, 11, (3, 5))
    found, lowered = lowered_products(Net(), ids, dynamic=dynamic)
    assert len(set(lowered)) >= 8
    assert set(lowered) <= set(found)


def test_inference_has_forward_products_only() -> None:
    with torch.no_grad():
        found, lowered = lowered_products(Net().eval(), torch.randint(0, 11, (3, 5)))
    assert set(lowered) == set(found)
    assert len(found) == 4


def test_the_search_leaves_no_trace() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()

    def backend(gm, example_inputs):
        find_products(gm, example_inputs)
        assert torch.equal(torch.random.get_rng_state(), state)
        return gm.forward

    torch.compile(model, backend=backend)(torch.randint(0, 11, (3, 5), generator=torch.Generator()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert getattr(model.get_parameter(name), "grad", None) is None


def test_the_fastest_wins_by_a_margin() -> None:
    table = CostTable()
    table.ops = {f"{ONE.key} blas": 100.0, f"{ONE.key} onednn": 100.0 * MARGIN}
    assert fastest([ONE, ONE], table, ["onednn"]) == ((ONE.key, "onednn"),)
    table.ops[f"{ONE.key} onednn"] = 100.0 * MARGIN + 0.1
    assert fastest([ONE], table, ["onednn"]) == ()  # near ties stay with the default
    table.ops |= {f"{ONE.key} other": 50.0, f"{TWO.key} blas": 9.0, f"{TWO.key} onednn": 1.0}
    assert fastest([TWO, ONE], table, ["onednn", "other"]) == (
        (ONE.key, "other"),
        (TWO.key, "onednn"),
    )
    assert fastest([ONE], CostTable(), ["onednn"]) == ()  # nothing known, nothing chosen


@needs_onednn
def test_each_product_is_measured_once() -> None:
    table = CostTable()
    state = torch.random.get_rng_state()
    assert measure_products([ONE, TWO, ONE], table, budget_s=0.01) == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sorted(table.ops) == sorted(
        f"{each.key} {name}" for each in (ONE, TWO) for name in ("blas", "onednn")
    )
    assert all(0.1 < us < 1e5 for us in table.ops.values())
    before = dict(table.ops)
    assert measure_products([ONE, TWO], table, budget_s=0.01) == 0
    assert table.ops == before


@needs_onednn
def test_choices_come_from_disk_the_second_time(own_cache, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MARGIN", 1e9)  # whatever is measured is chosen
    graphs = []
    torch.compile(Net(), backend=lambda gm, args: graphs.append((gm, args)) or gm.forward)(
        torch.randint(0, 11, (3, 5))
    )
    (graph,) = graphs
    chooser = KernelChooser(shared=False, budget_s=0.01)
    first = chooser(*graph)
    assert len(first) >= 8

    def refuse(*_):
        raise AssertionError("everything was known")

    monkeypatch.setattr(kernels, "find_products", refuse)
    monkeypatch.setattr(kernels, "medians_us", refuse)
    assert KernelChooser(shared=False)(*graph) == first
    for path in own_cache.rglob("*.json"):
        path.write_text("not JSON")  # a damaged cache is as good as none
    monkeypatch.undo()


def test_damaged_files_are_measured_anew(own_cache, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MARGIN", 1e9)
    graphs = []
    torch.compile(nn.Linear(3, 4), backend=lambda gm, a: graphs.append((gm, a)) or gm.forward)(
        torch.randn(5, 3)
    )
    chooser = KernelChooser(shared=False, budget_s=0.01)
    first = chooser(*graphs[0])
    files = list(own_cache.rglob("*.json"))
    assert len(files) == 2 or not available_kernels()
    for path in files:
        path.write_text(json.dumps({"format": 99}))
    assert chooser(*graphs[0]) == first


def test_lower_precision_has_its_own_kernels(monkeypatch) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert available_kernels() == ()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_graph_that_cannot_run_without_data_keeps_its_products(caplog) -> None:
    def fn(x):
        return x @ x

    gm = torch.fx.symbolic_trace(fn)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.args = (node.args[0], 3)
    gm.recompile()
    if available_kernels():
        assert KernelChooser(shared=False)(gm, [torch.randn(3, 3)]) == ()
        assert "cannot run on tensors without data" in caplog.text
