"""Lists of passes: presets, aliases, and the errors of a wrong order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchloom.errors import PassOrderError
from torchloom.graph import GraphPass
from torchloom.pipeline import PRESETS, Resolver, resolve_passes


def names(*args, **kwargs) -> list[str]:
    return [each.name for each in resolve_passes(*args, **kwargs)]


def test_presets_resolve() -> None:
    for stage, preset in PRESETS.items():
        assert names(stage) == list(preset)
    assert "prefetch" not in names(3, disabled=["prefetch"])
    with pytest.raises(PassOrderError, match="needs 'transfers'"):
        resolve_passes(3, disabled=["place"])


def test_deepspeed_names() -> None:
    basis = [
        "dedupe_gathers",
        "elide_copies",
        "cast_gathers",
        "zero3",
        "symmetric_gathers",
        "place",
    ]
    assert names(3, ["zero3_compile"]) == [*basis, "bucket"]
    asked = ["zero3_compile", "offload_adam_states_sync", "prefetch", "selective_gather"]
    assert names(3, asked) == [*basis, "selective_gather", "bucket", "prefetch"]
    assert names(3) == ["chunk_loss", *names(3, asked)]
    for stage in (1, 2):
        assert "bucket" in names(stage, [f"zero{stage}_compile"])
    assert names(3, ["zero3_compile", "bucket"]) == [*basis, "bucket"]
    assert "bucket" not in names(3, ["zero3_compile"], disabled=["bucket"])


def of_deepspeed(module: str, name: str) -> Callable[..., Any]:
    """Return a function that says that it is DeepSpeed's."""

    def rewrite(gm, graph_id, graph_order, profiling_results):
        raise NotImplementedError

    rewrite.__module__, rewrite.__name__ = f"deepspeed.compile.passes.{module}", name
    return rewrite


def test_deepspeeds_functions_are_its_names() -> None:
    zero3 = of_deepspeed("zero3_compile", "add_z3_gather_release")
    later = of_deepspeed("selective_gather", "selective_gather")
    ahead = of_deepspeed("prefetch", "schedule_prefetch")
    phase = of_deepspeed("offload_adam_states", "offload_adam_states_for_init")
    states = of_deepspeed("offload_adam_states", "move_opt_states")
    assert ["chunk_loss", *names(3, [zero3, ahead, later])] == list(PRESETS[3])
    named = names(3, ["zero3_compile", "offload_adam_states"])
    assert names(3, [phase, zero3, states]) == named
    (_, budgeted) = Resolver(3).timetable([(0, [zero3]), (5, [zero3, (ahead, 10**9)])]).entries
    assert budgeted.passes[-1].memory_budget_bytes == 10**9
    assert names(1, [of_deepspeed("zero_1_and_2_compile", "add_z1_reduce")])[-1] == "bucket"
    with pytest.raises(PassOrderError, match="unknown pass 'apply_autosp'"):
        names(3, [of_deepspeed("sp_compile", "apply_autosp")])


def test_own_passes_keep_their_place_among_deepspeeds() -> None:
    joint = GraphPass(name="early", fn=lambda gm, ctx: 0, stage="joint")

    def late(graph, bwd):
        return graph

    found = names(3, ["zero3_compile", joint, "prefetch", late, "selective_gather"])
    assert found.index("early") < found.index("place")
    assert found[-2:] == ["prefetch", "late"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["prefetsh"], ["prefetsh", "did you mean 'prefetch'", "Known passes"]),
        (["bucket"], ["'bucket' needs 'transfers'", "'place'"]),
        (["zero2", "zero3"], ["zero2", "zero3", "exclude"]),
        (["place", "zero3"], ["'zero3'", "before", "'place'"]),
        (["place", "place"], ["twice"]),
    ],
)
def test_errors_say_what_to_do(asked: list[str], words: list[str]) -> None:
    with pytest.raises(PassOrderError) as caught:
        resolve_passes(3, asked)
    for word in words:
        assert word in str(caught.value)
