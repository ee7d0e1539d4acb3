"""Schedules: what is due when, contracts, and what an error says."""

from __future__ import annotations

import pytest

from torchloom import PassContract, validate_schedule
from torchloom.errors import PassOrderError
from torchloom.pipeline import PassRegistry, Resolver


def named(passes) -> list[str]:
    return [each.name for each in passes]


def edit(graph):
    return graph


def registry(**contracts: PassContract | None) -> PassRegistry:
    made = PassRegistry()
    for name, contract in contracts.items():
        made.register(name, lambda graph: graph, contract)
    return made


def test_an_entry_is_due_from_its_step_on():
    plan = Resolver(3).timetable([(2, ["zero3_compile"]), (5, ["zero3_compile", "prefetch"])])
    assert named(plan.due(0).passes) == named(Resolver(3).passes())
    assert "prefetch" not in named(plan.due(2).passes)
    assert "prefetch" not in named(plan.due(4).passes)
    assert plan.due(5) is plan.due(500)
    assert "prefetch" in named(plan.due(5).passes)


@pytest.mark.parametrize("name", ["zero3", "zero3_compile", "offload_activation_floor"])
def test_names_of_torchloom_cannot_be_taken(name):
    with pytest.raises(PassOrderError, match="choose another"):
        PassRegistry().register(name, edit)


def test_needs_hold_within_one_entry_and_the_error_tells_all():
    known = registry(
        giver=PassContract(provides={"things"}), taker=PassContract(requires={"things"})
    )
    Resolver(3, known).timetable([(0, ["giver", "taker"])])
    with pytest.raises(PassOrderError) as caught:
        Resolver(3, known).timetable([(0, ["giver"]), (7, ["zero3_compile", "taker"])])
    for word in ("schedule step 7", "'taker'", "'things'", "'giver'", "so far: chunk_loss"):
        assert word in str(caught.value)


def test_conflicts_are_symmetric_also_against_passes_without_contract():
    for order in (["loner", "plain"], ["plain", "loner"]):
        with pytest.raises(PassOrderError, match="exclude each other"):
            known = registry(loner=PassContract(conflicts_with={"plain"}), plain=None)
            Resolver(3, known).passes(order)
    with pytest.raises(PassOrderError, match="exclude each other"):
        known = registry(mine=PassContract(conflicts_with={"zero3_compile"}))
        Resolver(3, known).passes(["zero3_compile", "mine"])


def test_validate_schedule():
    validate_schedule([(0, ["zero3_compile"]), (5, ["zero3_compile", ("prefetch", "1GB")])])
    known = registry(mine=PassContract(requires={"transfers"}))
    with pytest.raises(ValueError, match=r"step 3.*'mine' needs 'transfers'"):
        validate_schedule([(3, ["mine"])], known)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("zero3", "write .*step"),
        ([0, ["zero3"]], r"schedule\[0\] is 0"),
        ([("0", [])], "whole number"),
        ([(True, [])], "whole number"),
        ([(-1, [])], "negative"),
        ([(0, []), (0, [])], "twice"),
        ([(0, []), (9, []), (4, [])], r"schedule\[2\]: step 4 comes behind step 9"),
        ([(0, "zero3")], "not a list"),
        ([(0, [3])], "3 is no pass"),
        ([(0, [("prefetch", 1, 2)])], "not a pair"),
        ([(0, [("prefetch", "lots")])], "step 0: .*40GB"),
        ([(4, ["prefetsh"])], "step 4: unknown pass 'prefetsh'; did you mean 'prefetch'"),
    ],
)
def test_what_is_no_schedule(schedule, words):
    with pytest.raises(PassOrderError, match=words):
        validate_schedule(schedule)
