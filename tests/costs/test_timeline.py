"""Timelines of small graphs against sums by hand."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from torchloom import ops
from torchloom.costs import CostTable, collective_us, link_us, node_us
from torchloom.costs.timeline import timeline
from torchloom.graph import call, mark_fetched

aten = torch.ops.aten
TABLE = CostTable()
QUIET = replace(TABLE, network=replace(TABLE.network, load=0.0))
WORLD = 2


def graph_of(num_products: int, size: int = 512, ahead: bool = True) -> fx.Graph:
    """Return products beside a gather that starts before (or waits before) them, and its use."""
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        shard = graph.placeholder("shard")
        shard.meta["val"] = torch.empty(size * size // WORLD)
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(16, size)
        square = graph.placeholder("square")
        square.meta["val"] = torch.empty(size, size)
    start = call(graph, ops.gather_start, ([shard], ["w"], torch.float32, WORLD, "group"))
    pick = call(graph, operator.getitem, (start, 0))

    def wait() -> None:
        call(graph, ops.wait_, ([pick], [shard], "group"))

    if not ahead:
        wait()
    y = x
    for _ in range(num_products):
        y = call(graph, aten.mm.default, (y, square))
    if ahead:
        wait()
    weight = call(graph, aten.view.default, (pick, [size, size]))
    graph.output((call(graph, aten.mm.default, (y, weight)),))
    return graph


def products_us(graph: fx.Graph) -> list[float]:
    return [node_us(n, TABLE) for n in graph.nodes if n.target is aten.mm.default]


def test_what_compute_hides_is_not_exposed() -> None:
    gather_us = collective_us("all_gather", 512 * 512 * 4, WORLD, TABLE)
    long, short, blocked = graph_of(40), graph_of(1), graph_of(40, ahead=False)
    assert sum(products_us(long)[:-1]) > gather_us > products_us(short)[0]
    assert timeline([long], QUIET, WORLD).exposed_us == 0
    found = timeline([short], QUIET, WORLD)
    assert found.exposed_us == pytest.approx(gather_us - products_us(short)[0])
    assert found.total_us == pytest.approx(gather_us + products_us(short)[1])
    assert timeline([blocked], QUIET, WORLD).exposed_us == pytest.approx(gather_us)


def test_engines_work_in_order_and_beside_each_other() -> None:
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(1 << 20)
    starts = [call(graph, ops.offload_start, ([x],)) for _ in range(2)]
    picks = [call(graph, operator.getitem, (start, 0)) for start in starts]
    back = call(graph, ops.reload_start, ([picks[0]], torch.device("cpu")))
    came = call(graph, operator.getitem, (back, 0))
    for pick in (*picks, came):
        call(graph, ops.wait_, ([pick], [x], "host"))
    graph.output((came,))
    down, up = link_us("d2h", 4 << 20, TABLE), link_us("h2d", 4 << 20, TABLE)
    for full_duplex, expected in ((True, max(2 * down, up)), (False, 2 * down + up)):
        device = replace(TABLE.device, full_duplex=full_duplex, link_load=0.0)
        found = timeline([graph], replace(TABLE, device=device), WORLD)
        assert found.total_us == pytest.approx(expected)
        assert found.copy_us == pytest.approx(expected)
        loaded = timeline([graph], replace(TABLE, device=replace(device, link_load=0.5)), WORLD)
        hidden = max(0.0, sum(found.busy_us.values()) - found.exposed_us)
        assert loaded.copy_us == pytest.approx(expected + 0.5 * hidden)


def test_residents_are_gathered_once_for_many_uses() -> None:
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        shards = [graph.placeholder(f"s{i}") for i in range(3)]
        for shard in shards:
            shard.meta["val"] = torch.empty(1 << 20)
    for i, shard in enumerate(shards):
        call(graph, ops.resident, (shard, torch.float32, WORLD, "group", f"w{i}"))
    graph.output(())
    # Buckets of 16 MiB hold two of these weights.
    once = sum(collective_us("all_gather", n << 20, WORLD, TABLE) for n in (16, 8))
    options = {"gathers_per_use": 0.25, "bucket_bytes": 16 << 20}
    found = timeline([graph, graph], QUIET, WORLD, **options)
    assert found.exposed_us == pytest.approx(once / 4)
    assert found.copy_us == 0
    # The piece of one of them waits on the host, and is read when it is gathered.
    for resident in graph.find_nodes(op="call_function", target=ops.resident)[:1]:
        mark_fetched(resident)
    reads = timeline([graph, graph], QUIET, WORLD, **options)
    fetched_us = link_us("h2d", 4 << 20, QUIET) / 4
    assert reads.copy_us == pytest.approx(fetched_us)
    assert reads.exposed_us == pytest.approx(once / 4 + fetched_us)
