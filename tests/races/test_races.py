"""The race checker: what our passes emit is accepted, what is broken on purpose is rejected."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import fx, nn

from support.graphs import Options, TwoLayers, apply, captured, copy_of
from support.races import JOINT, LOWERED, OFFLOADING, Mixed, is_bad, mutants
from torchloom.errors import PassError
from torchloom.ops.match import offloads, reloads
from torchloom.pipeline.manager import check_races
from torchloom.races import Start, TransferSchedule, Use, WaitFor, find_races, schedule_of


def deep() -> nn.Module:
    layers = [part for _ in range(5) for part in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 1), nn.Flatten(0))


MODELS = {
    "two_layers": (TwoLayers, torch.randn(4, 6)),
    "mixed": (Mixed, torch.randn(5, 7)),
    "deep": (deep, torch.randn(3, 6)),
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    found = {}
    for name, (make, x) in MODELS.items():
        for kind, gm in captured(make(), [x], JOINT, options=OFFLOADING).items():
            if kind != "joint":
                found[f"{name}.{kind}"] = gm
    return found


def emitted(gm: fx.GraphModule, options: Options) -> TransferSchedule:
    copy = copy_of(gm)
    apply(copy, LOWERED, options=options)
    return schedule_of(copy.graph)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_what_passes_emit_is_accepted(graphs, slots: int, ahead: int) -> None:
    for gm in graphs.values():
        for bucket in (0, 600, 1 << 20):
            options = {
                "bucket": {"gather_bytes": bucket},
                "prefetch": {"max_bytes": ahead},
                "overlap_copies": {"slots": slots, "max_bytes": ahead},
            }
            schedule = emitted(gm, options)
            assert find_races(schedule) == []
            assert any(isinstance(event, Start) for event in schedule.events)


def test_every_bad_mutant_is_rejected(graphs) -> None:
    made, bad, strict, missed = Counter(), Counter(), Counter(), []
    for name, gm in graphs.items():
        original = emitted(gm, {"overlap_copies": {"slots": 1 if "two" in name else 2}})
        for kind, mutant in mutants(original):
            made[kind] += 1
            races = find_races(mutant)
            if is_bad(mutant, original):
                bad[kind] += 1
                if not races:
                    missed.append((name, kind))
            elif races:
                strict.update({race.kind for race in races})
    assert missed == []
    assert sum(bad.values()) >= 500
    assert set(bad) == {"dropped wait", "late wait", "early free", "moved start", "slot reuse"}
    # Exact, not only safe: nothing that every timing leaves as it was is rejected.
    assert not strict
    assert sum(made.values()) > sum(bad.values())


def test_engines_in_order_imply_earlier_transfers_and_the_network_does_not() -> None:
    def two(engine: str) -> list[str]:
        first = Start("a", engine, frozenset({"x"}), frozenset({"p"}))
        second = Start("b", engine, frozenset({"x"}), frozenset({"q"}))
        read = Use("read", reads=frozenset({"p"}))
        events = (first, second, WaitFor("b"), read, WaitFor("a"))
        return [race.kind for race in find_races(TransferSchedule(events, frozenset({"x"})))]

    assert two("to_host") == []
    assert two("network") == ["read before arrival"]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_broken_graph_is_an_error_that_names_the_race(graphs, kind: str) -> None:
    gm = copy_of(graphs[f"mixed.{kind}"])
    apply(gm, LOWERED)
    check_races(gm, "graph0", LOWERED[-1])
    copies = offloads(gm.graph) if kind == "forward" else reloads(gm.graph)
    gm.graph.erase_node(copies[0].wait)
    with pytest.raises(PassError, match=copies[0].start.name):
        check_races(gm, "graph0", LOWERED[-1])


@pytest.mark.parametrize("pair_has_value", [False, True])
def test_nested_results_are_written_by_what_made_them(pair_has_value: bool) -> None:
    """torch records no value for the call that its partitioner adds to save a random state."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    made = graph.call_function(torch.ops.higher_order.run_and_save_rng_state, (x,))
    pair = graph.call_function(operator.getitem, (made, 1))
    if pair_has_value:
        pair.meta["val"] = (torch.ones(3),)
    value = graph.call_function(operator.getitem, (pair, 0))
    value.meta["val"] = torch.ones(3)
    graph.output((graph.call_function(torch.ops.aten.neg.default, (value,)),))
    assert find_races(schedule_of(graph)) == []
