"""Options are bound to the pass that uses them, and are part of what compiled graphs are cached under."""

from __future__ import annotations

import pytest

from torchloom.config import load_config
from torchloom.errors import PassError, PassOrderError
from torchloom.graph import GraphPass, PassContext, options_of
from torchloom.passes import PASSES
from torchloom.pipeline import CompileSession, Resolver, resolve_passes
from torchloom.pipeline.keys import identity_of


def test_every_option_of_a_built_in_pass_has_a_default() -> None:
    found = {name: options_of(each.fn) for name, each in PASSES.items()}
    assert found["bucket"] == {"gather_bytes": 16 << 20, "reduce_bytes": 16 << 20}
    assert found["prefetch"] == {"max_bytes": 16 << 20, "uses_ahead": 0}
    assert found["zero3"] == {}


@pytest.mark.parametrize("value", ["32MB", -1, True])
def test_a_value_of_another_kind_is_refused(value) -> None:
    with pytest.raises(
        PassError, match=r"'max_bytes' of pass 'prefetch' is .*: give a whole number"
    ):
        PASSES["prefetch"].with_options(max_bytes=value)
    with pytest.raises(PassOrderError, match="schedule step 3: option 'max_bytes'"):
        Resolver(3).timetable([(3, ["zero3", "place", ("prefetch", {"max_bytes": value})])])


def test_a_schedule_gives_a_pass_options_which_win_over_settings() -> None:
    resolver = Resolver(3, options={"prefetch": {"max_bytes": 5}, "bucket": {"gather_bytes": 7}})
    own = [*("zero3", "place", "bucket"), ("prefetch", {"max_bytes": 9})]
    passes = {each.name: each for each in resolver.passes(own)}
    assert passes["prefetch"].option("max_bytes") == 9
    assert passes["bucket"].option("gather_bytes") == 7
    assert passes["bucket"].option("reduce_bytes") == 16 << 20
    with pytest.raises(
        PassOrderError, match="schedule step 0: pass 'prefetch' has no option 'max'"
    ):
        resolver.timetable([(0, ["zero3", "place", ("prefetch", {"max": 9})])])
    with pytest.raises(PassOrderError, match="stands for several passes"):
        resolver.passes([("zero3_compile", {"max_bytes": 9})])


def test_the_config_names_options_of_passes() -> None:
    config = load_config(
        {
            "zero_optimization": {"stage": 3, "allgather_bucket_size": 1000},
            "compile": {
                "offload_activation": True,
                "offload_activation_threshold": 77,
                "double_buffer": False,
                "schedule": [[0, ["zero3", "place", ["prefetch", {"max_bytes": 11}]]]],
            },
        }
    )
    options = config.compile.pass_options
    assert options["offload_activation"]["min_bytes"] == 77
    assert options["overlap_copies"]["slots"] == 1
    assert options["bucket"]["gather_bytes"] == 4000
    assert config.compile.extra_passes == ("offload_activation",)
    for name, given in options.items():  # no setting names an option that its pass does not have
        PASSES[name].with_options(**given)
    passes = Resolver(3, options=options).timetable(config.compile.schedule).due(0).passes
    assert passes[-1].option("max_bytes") == 11


def test_options_are_part_of_the_cache_key() -> None:
    def key_of(options) -> str:
        passes = resolve_passes(3, options=options)
        return CompileSession(passes=passes, context=PassContext(world_size=2)).round_key

    assert key_of({}) == key_of({})
    assert len({key_of({"prefetch": {"max_bytes": size}}) for size in (1, 2)}) == 2

    def mine(gm, ctx, *, depth: int = 1, table: object = None) -> int:
        return 0

    plain = GraphPass(name="mine", fn=mine, stage="lowered")
    assert identity_of(plain) != identity_of(plain.with_options(depth=2))
    assert not identity_of(plain.with_options(table=object())).is_complete
