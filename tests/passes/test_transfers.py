"""place, bucket, prefetch: where communication stands in the split graphs."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from support.graphs import CONTEXT, TwoLayers, apply, captured, copy_of
from torchloom import ops
from torchloom.graph import Choices, SharedWeights, find, graph_text, live_bytes, positions
from torchloom.ops.match import Transfer, gathers, reductions

X = torch.randn(4, 6)
LOWERED = ["place", "bucket", "prefetch"]


@pytest.fixture(scope="module")
def two_layers() -> dict[str, fx.GraphModule]:
    return captured(TwoLayers(), [X], ["dedupe_gathers", "elide_copies", "zero3"])


@pytest.fixture(scope="module")
def deep() -> dict[str, fx.GraphModule]:
    layers = [part for _ in range(8) for part in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 1), nn.Flatten(0))
    return captured(model, [torch.randn(3, 16)], ["dedupe_gathers", "elide_copies", "zero3"])


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_golden(two_layers, kind: str, count: int, golden) -> None:
    gm = copy_of(two_layers[kind])
    apply(gm, LOWERED[:count])
    golden(f"{LOWERED[count - 1]}.{kind}", graph_text(gm.graph))


def test_place_leaves_no_traced_operator(two_layers) -> None:
    gm = copy_of(two_layers["backward"])
    apply(gm, ["place"])
    assert not any(find(gm.graph, op) for op in (ops.gather, ops.reduce, ops.sync))
    assert apply(gm, ["place"]).passes[0].num_edits == 0


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_buckets_of_deep_models_hold_a_bounded_number_of_weights(deep, kind, monkeypatch) -> None:
    unbounded = copy_of(deep[kind])
    apply(unbounded, ["place", "bucket"])
    monkeypatch.setattr(import_module("torchloom.passes.bucket"), "MOST_MEMBERS", 5)
    gm = copy_of(deep[kind])
    apply(gm, ["place", "bucket"])
    for found in (gathers, reductions):
        members = [len(each.results) for each in found(gm.graph)]
        alone = [len(each.results) for each in found(unbounded.graph)]
        assert sum(members) == sum(alone)
        assert max(members, default=0) == min(5, max(alone, default=0))
    assert max(len(each.results) for each in gathers(unbounded.graph)) > 5


def sizes(gather: int, reduce: int, ahead: int) -> dict[str, dict[str, int]]:
    bucket = {"gather_bytes": gather, "reduce_bytes": reduce}
    return {"bucket": bucket, "prefetch": {"max_bytes": ahead}}


@settings(max_examples=12, deadline=None)
@given(
    gather=st.sampled_from([0, 1, 1100, 2500, 1 << 20]),
    reduce=st.sampled_from([0, 1, 1100, 2500, 1 << 20]),
    ahead=st.sampled_from([0, 1, 1100, 2500, 5000, 1 << 20]),
    kind=st.sampled_from(["forward", "backward"]),
    planned=st.sampled_from([None, 0, 1100, 1 << 20]),
)
def test_every_schedule_is_legal_and_bounded(deep, gather, reduce, ahead, kind, planned) -> None:
    context, options = CONTEXT, sizes(gather, reduce, ahead)
    if planned is not None:  # buckets within both bounds, and the plan's depth
        choices = Choices(bucket_bytes=planned, prefetch_bytes=ahead)
        context = dataclasses.replace(context, choices=choices)
        options = sizes(gather, reduce, 1 << 20)
        gather, reduce = min(gather, planned), min(reduce, planned)
    gm = copy_of(deep[kind])
    apply(gm, LOWERED, context, options)
    where = positions(gm.graph)
    for transfer in (*gathers(gm.graph), *reductions(gm.graph)):
        check_order(transfer, where)
    for transfer in gathers(gm.graph):
        assert len(transfer.results) == 1 or transfer.result_bytes <= gather
    for transfer in reductions(gm.graph):
        assert len(transfer.results) == 1 or transfer.input_bytes <= reduce
    assert ahead_bytes(gm.graph) <= max(ahead, largest(gm.graph))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_one_use_ahead_whatever_its_size(deep, kind: str) -> None:
    def starts_and_uses(**options: int) -> list[tuple[int, int]]:
        gm = copy_of(deep[kind])
        apply(gm, LOWERED, options={**sizes(0, 0, 1), "prefetch": {"max_bytes": 1, **options}})
        where = positions(gm.graph)
        for transfer in (*gathers(gm.graph), *reductions(gm.graph)):
            check_order(transfer, where)
        found = [(where[each.start], where[each.wait]) for each in gathers(gm.graph)]
        return sorted(found, key=lambda each: each[1])

    alone, ahead = starts_and_uses(), starts_and_uses(uses_ahead=1)
    assert len(alone) == len(ahead) > 5
    assert not any(start < wait for (start, _), (_, wait) in zip(alone[1:], alone, strict=False))
    assert all(start < wait for (start, _), (_, wait) in zip(ahead[1:], ahead, strict=False))
    # Not two ahead.
    assert not any(start < wait for (start, _), (_, wait) in zip(ahead[2:], ahead, strict=False))


def _most(graph: fx.Graph, sizes: list[tuple[Transfer, int]]) -> int:
    """The most bytes of transfers that have been started and are not yet waited for."""
    most = current = 0
    started = {t.start: size for t, size in sizes}
    ended = {t.wait: size for t, size in sizes}
    for node in graph.nodes:
        current += started.get(node, 0) - ended.get(node, 0)
        most = max(most, current)
    return most


def ahead_bytes(graph: fx.Graph) -> int:
    return _most(graph, [(t, t.result_bytes) for t in gathers(graph)])


def in_flight_bytes(graph: fx.Graph) -> int:
    return _most(graph, [(t, t.input_bytes) for t in reductions(graph)])


def test_reductions_wait_on_where_memory_is_shared_and_free(deep) -> None:
    # Shared weights of another group: their gathers stay, and what ranks share is known.
    shared = dataclasses.replace(
        CONTEXT, shared_weights=SharedWeights(name="other", handle="other", params=())
    )
    contexts = {
        "network": CONTEXT,
        "shared": shared,
        "planned": dataclasses.replace(shared, memory_budget_bytes=1 << 30),
    }
    graphs = {}
    for name, context in contexts.items():
        gm = copy_of(deep["backward"])
        apply(gm, LOWERED, context, sizes(1, 1, 1))
        where = positions(gm.graph)
        for transfer in reductions(gm.graph):
            check_order(transfer, where)
        graphs[name] = gm.graph
    assert max(live_bytes(graphs["shared"])) <= max(live_bytes(graphs["network"]))
    biggest = max(t.input_bytes for t in reductions(graphs["shared"]))
    assert in_flight_bytes(graphs["network"]) <= 2 * biggest
    assert in_flight_bytes(graphs["planned"]) <= 2 * biggest
    assert in_flight_bytes(graphs["shared"]) > 2 * biggest


def check_order(transfer: Transfer, where: dict[fx.Node, int]) -> None:
    """Inputs before the start, start before the wait, the wait before every reader."""
    assert all(where[node] < where[transfer.start] for node in transfer.inputs)
    assert where[transfer.start] < where[transfer.wait]
    readers = (user for pick in transfer.results for user in pick.users)
    assert all(where[user] > where[transfer.wait] for user in readers if user is not transfer.wait)


def largest(graph: fx.Graph) -> int:
    return max((t.result_bytes for t in gathers(graph)), default=0)
