"""Lists of passes: presets, aliases, and the errors of a wrong order."""

from __future__ import annotations

import pytest

from torchloom.errors import PassOrderError
from torchloom.graph import GraphPass
from torchloom.pipeline import PRESETS, resolve_passes


def names(*args, **kwargs) -> list[str]:
    return [each.name for each in resolve_passes(*args, **kwargs)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_presets_resolve(stage: int) -> None:
    assert names(stage) == list(PRESETS[stage])


def test_one_pass_off_by_name() -> None:
    assert "prefetch" not in names(3, disabled=["prefetch"])


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
    assert names(3, asked) == [*basis, "selective_gather", "bucket", "prefetch"] == list(PRESETS[3])
    for stage in (1, 2):
        assert "bucket" in names(stage, [f"zero{stage}_compile"])
    assert names(3, ["zero3_compile", "bucket"]) == [*basis, "bucket"]
    assert "bucket" not in names(3, ["zero3_compile"], disabled=["bucket"])


def test_own_passes_keep_their_place_among_deepspeeds() -> None:
    joint = GraphPass(name="early", fn=lambda gm, ctx: 0, stage="joint")

    def late(graph, bwd):
        return graph

    found = names(3, ["zero3_compile", joint, "prefetch", late, "selective_gather"])
    assert found.index("early") < found.index("place")
    assert found[-2:] == ["prefetch", "late"]


def test_own_pass() -> None:
    own = GraphPass(name="mine", fn=lambda gm, ctx: 0, stage="joint")
    assert names(3, [own, "zero3", "place"]) == ["mine", "zero3", "place"]


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


def test_disabling_what_others_need() -> None:
    with pytest.raises(PassOrderError, match="needs 'transfers'"):
        resolve_passes(3, disabled=["place"])
