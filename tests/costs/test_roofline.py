"""FLOPs, bytes and modelled times against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchloom.costs import (
    DEVICES,
    CostTable,
    collective_us,
    device_row,
    graph_us,
    link_us,
    node_flops,
    node_traffic_bytes,
    node_us,
    roofline_us,
)
from torchloom.errors import PlanError

ROW = dataclasses.replace(
    DEVICES["cpu"],
    gemm_flops={"float32": 1e9, "bfloat16": 4e9},
    memory_bytes_per_s=1e6,
    launch_us=3.0,
    attention_fraction=0.5,
)
TABLE = CostTable(device=ROW)
aten = torch.ops.aten


def traced(fn, *args, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*args).graph


def only(graph, target):
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def with_gradient(fn):
    def both(*args):
        leaves = [a.detach().requires_grad_() for a in args]
        out = fn(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


def test_products() -> None:
    graph = traced(with_gradient(lambda x, w: x @ w.t()), torch.randn(7, 5), torch.randn(3, 5))
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [node_flops(node) for node in products] == [2 * 7 * 5 * 3] * 3
    forward = products[0]
    assert node_traffic_bytes(forward) == 4 * (7 * 5 + 3 * 5 + 7 * 3)
    # 210 FLOPs at 1 GFLOP/s are 0.21 us, 284 bytes at 1 MB/s are 284 us: memory decides.
    assert node_us(forward, TABLE) == pytest.approx(3.0 + 284.0)


def test_products_of_experts() -> None:
    """8 rows of 16 for 2 experts with matrices of 16 x 32; the gradients are as large."""

    def of_experts(x, w):
        ends = torch.arange(3, 9, 5, dtype=torch.int32)
        return torch._grouped_mm(x, w, offs=ends)

    rows, weights = (torch.randn(*shape).bfloat16() for shape in ((8, 16), (2, 16, 32)))
    graph = traced(with_gradient(of_experts), rows, weights)
    products = graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
    assert [node_flops(node) for node in products] == [2 * 8 * 16 * 32] * 3
    batched = traced(torch._grouped_mm, torch.randn(2, 8, 16).bfloat16(), weights)
    assert node_flops(only(batched, aten._grouped_mm.default)) == 2 * 2 * 8 * 16 * 32


def test_a_large_product_is_bound_by_its_flops() -> None:
    graph = traced(torch.mm, torch.randn(64, 2048), torch.randn(2048, 64))
    row = dataclasses.replace(ROW, memory_bytes_per_s=1e12)
    assert roofline_us(only(graph, aten.mm.default), row) == pytest.approx(
        3.0 + 2 * 64 * 2048 * 64 / 1e3
    )


def test_convolution_forward_and_backward() -> None:
    x, w = torch.randn(2, 3, 9, 7), torch.randn(5, 3, 3, 3)
    graph = traced(with_gradient(lambda x, w: F.conv2d(x, w, padding=1)), x, w)
    flops = 2 * 2 * 5 * 9 * 7 * 3 * 3 * 3
    assert node_flops(only(graph, aten.convolution.default)) == flops
    assert node_flops(only(graph, aten.convolution_backward.default)) == 2 * flops


def test_attention_that_backward_computes_again_takes_its_time() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    state = graph.placeholder("fwd_rng_state_0")
    flash = aten._scaled_dot_product_flash_attention.default
    again = torch._prims.rng_prims.graphsafe_run_with_rng_state
    plain = graph.call_function(flash, (q, q, q, 0.0, True))
    second = graph.call_function(again, (flash, q, q, q, 0.0, True), {"rng_state": state})
    with FakeTensorMode():
        q.meta["val"] = torch.empty(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16)
        state.meta["val"] = torch.Generator()
        plain.meta["val"] = second.meta["val"] = flash(*[q.meta["val"]] * 3, 0.0, True)
    assert node_flops(second) == node_flops(plain) > 0
    assert roofline_us(second, ROW) == roofline_us(plain, ROW)


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_attention(causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 11, 8) for _ in range(3))

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    graph = traced(with_gradient(attend), q, k, v)
    product = 2 * 2 * 4 * 11 * 11 * 8
    half = 2 if causal else 1
    forward = only(graph, aten._scaled_dot_product_flash_attention_for_cpu.default)
    backward = only(graph, aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert node_flops(forward) == 2 * product // half
    assert node_flops(backward) == 5 * product // half  # scores again, and four gradients
    row = dataclasses.replace(ROW, memory_bytes_per_s=1e15, launch_us=0.0)
    assert roofline_us(forward, row) == pytest.approx(2 * product / half / 1e9 / 0.5 * 1e6)


def test_views_and_bookkeeping_are_free() -> None:
    def fn(x):
        first, second = x.view(3, 4).t().split(2)
        return torch.empty_like(x), first.unsqueeze(0).expand(5, -1, -1), second.detach()

    costs = graph_us(traced(fn, torch.randn(12)), TABLE)
    assert len(costs) > 6
    assert [us for _, us in costs] == [0.0] * len(costs)


def test_bytes_are_counted_once_and_expanded_ones_never() -> None:
    def fn(x, row):
        return x + row.expand(6, 5)

    node = only(traced(fn, torch.randn(6, 5), torch.randn(5)), aten.add.Tensor)
    assert node_traffic_bytes(node) == 4 * (30 + 5 + 30)
    node = only(traced(lambda x: x * x, torch.randn(6, 5)), aten.mul.Tensor)
    assert node_traffic_bytes(node) == 4 * (30 + 30)


def test_lookups_read_only_what_they_return() -> None:
    node = only(
        traced(lambda i, t: F.embedding(i, t), torch.tensor([3, 3, 1]), torch.randn(1000, 8)),
        aten.embedding.default,
    )
    assert node_traffic_bytes(node) == 3 * 8 + 2 * 3 * 8 * 4


def test_a_fused_optimizer_step_reads_four_words_and_writes_three() -> None:
    params, grads, first, second = ([torch.randn(10), torch.randn(3)] for _ in range(4))
    steps = [torch.ones(()), torch.ones(())]

    def fn(params, grads, first, second, steps):
        torch._fused_adamw_(
            params, grads, first, second, [], steps,
            lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return params[0]

    graph = traced(fn, params, grads, first, second, steps)
    (node,) = [n for n in graph.nodes if "fused_adamw" in str(n.target)]
    words = 13 * (4 + 3)
    # The operator's schema lets it write the gradients, too; the two step counts are read.
    assert node_traffic_bytes(node) == 4 * (words + 13 + 2)


def test_unknown_sizes_count_as_what_was_seen_and_stay_unknown() -> None:
    graph = traced(
        lambda x, w: torch.relu(x @ w), torch.randn(7, 5), torch.randn(5, 3), mode="symbolic"
    )
    node = only(graph, aten.mm.default)
    assert node_flops(node) == 2 * 7 * 5 * 3
    assert node_traffic_bytes(only(graph, aten.relu.default)) == 2 * 4 * 21
    assert not isinstance(node.meta["val"].shape[0], int)


def test_our_communication_is_not_compute() -> None:
    from torchloom import ops

    def fn(x):
        return ops.gather(x, [4, 3], torch.float32, torch.float32, "2x1#t", "w") + 1

    graph = traced(fn, torch.randn(6))
    assert node_us(only(graph, ops.gather), TABLE) == 0.0


def test_collectives() -> None:
    net = dataclasses.replace(TABLE.network, alpha_us=10.0, bytes_per_s=1e6, factors={})
    table = CostTable(network=net)
    assert collective_us("all_gather", 400, 4, table) == pytest.approx(30 + 300)
    assert collective_us("all_reduce", 400, 4, table) == pytest.approx(60 + 600)
    assert collective_us("all_gather", 400, 1, table) == 0.0
    slower = CostTable(network=dataclasses.replace(net, factors={"reduce_scatter": 2.0}))
    assert collective_us("reduce_scatter", 400, 4, slower) == pytest.approx(660)


def test_links_and_rows() -> None:
    table = CostTable(device=device_row("h100-80gb"))
    assert link_us("h2d", 55_000_000_000, table) == pytest.approx(1e6, rel=1e-3)
    assert device_row("h200-141gb").memory_bytes_per_s > device_row("h100-80gb").memory_bytes_per_s
    with pytest.raises(PlanError, match=r"unknown device 'h1000'.*h100-80gb"):
        device_row("h1000")
