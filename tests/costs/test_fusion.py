"""What fused code moves: first inputs and last outputs of a chain, never across a product."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchloom.costs import CostTable, device_row, node_us
from torchloom.costs.fusion import fused_us
from torchloom.costs.timeline import timeline

ROWS, DIM = 96, 40
# A microsecond for each byte, and nothing for the start.
BYTEWISE = replace(device_row("h100-80gb"), memory_bytes_per_s=1e6, launch_us=0.0)
BYTES = ROWS * DIM * 4


def moved(fn, *shapes: tuple[int, ...]) -> tuple[fx.Graph, list[float]]:
    """Return a traced graph, and the bytes of each operator that belongs to a kernel of elementwise code."""
    inputs = [torch.randn(shape) for shape in shapes]
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    return graph, list(fused_us(graph, BYTEWISE).values())


def test_values_inside_of_a_chain_are_not_moved() -> None:
    _, found = moved(lambda x, y: (x * y).exp().add(x).sigmoid(), (ROWS, DIM), (ROWS, DIM))
    assert sum(found) == 3 * BYTES  # x and y once each, and the result


def test_reductions_over_rows_end_a_chain_without_a_second_reading() -> None:
    _, found = moved(lambda x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt(), (ROWS, DIM))
    per_row = sum(found) - 2 * BYTES
    assert 0 <= per_row <= 8 * ROWS * 4  # what is held of a row may be read and written on the way


def test_reductions_over_columns_are_kernels_of_their_own() -> None:
    graph, _ = moved(lambda x: x.exp().sum(0), (ROWS, DIM))
    traffic = fused_us(graph, BYTEWISE)
    assert sum(traffic.values()) == 2 * BYTES  # exp alone; the sum reads what it has written
    assert all("sum" not in str(node.target) for node in traffic)


def test_code_waits_for_a_product() -> None:
    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp() + 1
        return (y @ w).sigmoid() + y

    _, found = moved(residual, (ROWS, DIM), (DIM, DIM))
    # x -> y, then the product and y -> result
    assert sum(found) == 2 * BYTES + 3 * BYTES


def test_what_is_read_outside_is_written() -> None:
    _, found = moved(lambda x: (x.exp(), x.exp().sin()), (ROWS, DIM))
    assert sum(found) == 3 * BYTES or sum(found) == 4 * BYTES
    _, views = moved(lambda x: x.exp().view(-1)[: DIM * 3].sin(), (ROWS, DIM))
    assert sum(views) == 2 * BYTES + 2 * 4 * DIM * 3  # another number of elements: another kernel


def test_only_devices_with_a_compiler_that_fuses_count_so() -> None:
    graph, _ = moved(lambda x, y: (x * y).exp().add(x).sigmoid(), (ROWS, DIM), (ROWS, DIM))
    one_by_one = CostTable()
    fused = CostTable(device=device_row("h100-80gb"))
    assert timeline([graph], one_by_one, 1).compute_us == sum(
        node_us(node, one_by_one) for node in graph.nodes
    )
    found = timeline([graph], fused, 1)
    device = fused.device
    assert found.compute_us == device.launch_us + 1e6 * 3 * BYTES / device.memory_bytes_per_s
    assert found.compute_by == {"elementwise": found.compute_us}
