"""Measured figures win over modelled ones, and are found again under the same signature."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import torchloom.runtime  # noqa: F401  binds the operators
from torchloom import ops
from torchloom.costs import (
    CostTable,
    collective_us,
    graph_us,
    node_key,
    node_us,
    roofline_us,
)
from torchloom.costs.measure import can_measure


def traced(fn, *args, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*args).graph


def nodes(graph, target):
    return graph.find_nodes(op="call_function", target=target)


def model(x, table, ids, w):
    picked = F.embedding(ids, table)
    y = torch.softmax(picked @ w + x, dim=-1)
    return F.dropout(y, 0.5), y.sum(0, keepdim=True), y.topk(2)


ARGS = (
    torch.randn(5, 4),
    torch.randn(9, 3),
    torch.tensor([1, 8, 0, 8, 5]),
    torch.randn(4, 3).t(),
)


def test_every_operator_is_measured_alone_and_once() -> None:
    graph = traced(model, *ARGS)
    table = CostTable()
    state = torch.random.get_rng_state()
    num_measured = table.measure(graph.nodes, budget_s=0.002)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert num_measured == len(table.ops) >= 7
    costs = dict(graph_us(graph, table))
    for node in graph.nodes:
        if can_measure(node):
            assert costs[node] == table.ops[node_key(node)] != roofline_us(node, table.device)
    assert table.measure(graph.nodes) == 0
    assert CostTable(ops=table.ops).measure(traced(model, *ARGS).nodes) == 0  # another trace


def test_what_writes_or_communicates_is_not_run() -> None:
    def fn(x, y):
        x.add_(y)
        full = ops.gather(y, [8], torch.float32, torch.float32, "2x1#nowhere", "w")
        return x, full

    graph = traced(fn, torch.randn(4), torch.randn(4))
    assert CostTable().measure(graph.nodes) == 0  # the group does not even exist


def test_what_random_inputs_cannot_feed_stays_modelled() -> None:
    graph = traced(torch.linalg.cholesky, torch.eye(3))
    table = CostTable()
    table.measure(graph.nodes, budget_s=0.001)
    (node,) = [n for n in graph.nodes if "cholesky" in str(n.target)]
    assert node_us(node, table) > 0
    half = CostTable(ops=table.ops, figures={"core_share": 0.5})
    assert node_us(node, half) == 2 * node_us(node, table)


def test_measured_collectives_are_interpolated() -> None:
    table = CostTable(collectives={"all_gather/2": [(1000, 10.0), (2000, 30.0), (4000, 40.0)]})
    at = {size: collective_us("all_gather", size, 2, table) for size in (500, 1500, 2000, 6000)}
    assert at == pytest.approx({500: 10.0, 1500: 20.0, 2000: 30.0, 6000: 50.0})
    # Four ranks: the model, scaled by how far it was off for two.
    model = CostTable().network
    off = 30.0 / model.collective_us("all_gather", 2000, 2)
    wanted = off * model.collective_us("all_gather", 2000, 4)
    assert collective_us("all_gather", 2000, 4, table) == pytest.approx(wanted)
    assert collective_us("all_reduce", 2000, 2, table) == model.collective_us("all_reduce", 2000, 2)
    assert collective_us("all_gather", 2000, 1, table) == 0.0
