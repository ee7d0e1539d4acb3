"""Pieces of parameters in host memory: the same training to the bit, on less device memory."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import torchloom
from support.fuzzing import fuzzed
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, settings, train, weights
from torchloom.engine import Engine
from torchloom.errors import ConfigError, PlanError
from torchloom.plan.text import diff_plans, show_plan
from torchloom.runtime.host import is_on_host

PIECES = {"offload_parameters": True}
EVERYTHING: dict[str, Any] = {
    **PIECES,
    "offload_opt_states": True,
    "offload_activation": True,
    "offload_activation_threshold": 1,
    "free_activation": True,
    "free_activation_threshold": 1,
}
HARD: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}


def on_host(engine: Engine) -> set[str]:
    """Names of the parameters whose memory is on the host; empty ones have none."""
    return {n for n, p in engine.module.named_parameters() if p.numel() and is_on_host(p)}


def run(rank: int, stage: int, mode: str, seed: int | None = None, **options: Any):
    torch._dynamo.reset()
    engine, model = make_engine(stage, compile={"strict": True, **options}, **HARD)
    if mode != "eager":
        engine.compile(backend=mode)
    if seed is None:
        losses = train(engine, rank, 3)
    else:
        with fuzzed(seed=seed + 5 * rank, most_s=1e-3):
            losses = train(engine, rank, 3)
    collectives: dict[str, int] = {}
    for graph in engine.compile_report().graphs:
        collectives.update(graph.collectives)
    return losses, weights(model), on_host(engine), collectives, engine.move_stats()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_bit_identical_alone_and_with_everything(mode: str, stage: int) -> None:
    def fn(rank):
        plain = run(rank, stage, mode)
        alone = run(rank, stage, mode, seed=1, **PIECES)
        return plain, alone, run(rank, stage, mode, seed=2, double_buffer=False, **EVERYTHING)

    for plain, *moved in run_ranks(2, fn):
        for losses, values, hosts, collectives, stats in moved:
            assert losses == plain[0]
            assert_equal(values, plain[1])
            assert {"embed.weight", "up.weight", "down.weight", "frozen.weight"} <= hosts
            assert stats.reloaded_bytes > 0
            if mode != "eager":
                assert collectives["forward torchloom.reload_start"] > 0
        assert not plain[2]


def test_inductor_with_everything() -> None:
    def fn(rank):
        plain = run(rank, 3, "inductor")
        moved = run(rank, 3, "inductor", **EVERYTHING)
        return plain, moved, run(rank, 3, "inductor", seed=3, **EVERYTHING)

    for plain, moved, fuzzy in run_ranks(2, fn):
        assert moved[0] == pytest.approx(plain[0], rel=1e-5)
        assert fuzzy[0] == moved[0]
        assert_equal(fuzzy[1], moved[1])


def test_selective_gather_reads_pieces_on_the_host(tmp_path) -> None:
    passes = ["zero3_compile", "selective_gather", "bucket"]
    path = tmp_path / "plan.json"

    def fn(rank, options):
        torch._dynamo.reset()
        options = {"strict": True, "replan_step": 0, "passes": passes, **options}
        engine, model = make_engine(3, compile=options, **HARD)
        engine.compile(backend="aot_eager")
        losses = train(engine, rank, 3)
        (report,) = engine.compile_report().graphs
        return losses, weights(model), on_host(engine), engine.plan(), report.collectives

    plain = run_ranks(2, fn, {"memory_budget": "1GB"})
    plan = run_ranks(2, fn, {"memory_budget": "1GB", **PIECES})[0][3]
    (graph,) = plan.graphs
    assert len(graph.resident) == 4
    # All pieces wait now, and weights stay gathered nevertheless.
    dataclasses.replace(plan, graphs=(dataclasses.replace(graph, pieces={}),)).save(path)
    moved = run_ranks(2, fn, {"plan": str(path), **PIECES})
    for left, right in zip(plain, moved, strict=True):
        assert left[0] == right[0]
        assert_equal(left[1], right[1])
        assert right[2] == set(graph.resident)
        assert not any(name.endswith(("reload_start", "gather_start")) for name in right[4])
        assert right[3].graphs[0].resident == graph.resident


def test_the_budget_chooses_the_pieces_that_wait() -> None:
    own = {
        "strict": True,
        "replan_step": 0,
        "disable_passes": ["selective_gather", "bucket", "prefetch"],
    }

    def fn(rank, options):
        torch._dynamo.reset()
        engine, model = make_engine(3, compile={**own, **options}, **HARD)
        engine.compile(backend="aot_eager")
        losses = train(engine, rank, 3)
        graphs = engine.compile_report().graphs
        reloads = sum(
            graph.collectives.get("forward torchloom.reload_start", 0) for graph in graphs
        )
        return losses, weights(model), on_host(engine), reloads, engine.plan()

    plain = run_ranks(2, fn, {"memory_budget": "1GB"})
    roomy = run_ranks(2, fn, {"memory_budget": "1GB", **PIECES})
    plan = roomy[0][4]
    sizes = plan.graphs[0].pieces
    assert len(sizes) == 4
    assert plan.base_bytes + sum(sizes.values()) == plain[0][4].base_bytes
    assert plan.peak_bytes <= plain[0][4].peak_bytes
    (graph,) = plan.graphs
    outside = plan.base_bytes + graph.batch_bytes

    def refused(rank):
        with pytest.raises(PlanError, match="the minimum is") as caught:
            fn(rank, {"memory_budget": outside + 10_000, **PIECES})
        return str(caught.value)

    (least,) = {re.findall(r"the minimum is ([\d,]+)\.", text)[0] for text in run_ranks(2, refused)}
    budget = outside + int(least.replace(",", "")) + sum(sizes.values()) // 2
    tight = run_ranks(2, fn, {"memory_budget": budget, **PIECES})
    for rank in range(2):
        for losses, values, *_ in (roomy[rank], tight[rank]):
            assert losses == plain[rank][0]
            assert_equal(values, plain[rank][1])
        assert roomy[rank][2:4] == (set(), 0)
        hosts, reloads, mine = tight[rank][2:]
        assert hosts == set(sizes) - mine.graphs[0].pieces.keys()
        assert 0 < len(hosts) < 4
        assert reloads > 0
        assert mine.peak_bytes <= mine.budget_bytes
    assert "shards of parameters stay on the device" in show_plan(tight[0][4])
    assert "shards wait on the host: " in diff_plans(plan, tight[0][4])


def test_begins_and_ends_by_name() -> None:
    names = ["zero3_compile", "bucket", "prefetch"]

    def fn(rank, schedule):
        torch._dynamo.reset()
        engine, model = make_engine(3, compile={"strict": True}, **HARD)
        engine.compile(backend="aot_eager", schedule=schedule)
        losses, where = [], []
        for step in range(4):
            losses += train(engine, rank, 1, first=step)
            where.append(bool(on_host(engine)))
        return losses, weights(model), where

    schedule = [(0, names), (1, [*names, "offload_parameters"]), (3, names)]
    plain = run_ranks(2, fn, [(0, names)])
    for left, right in zip(plain, run_ranks(2, fn, schedule), strict=True):
        assert left[0] == right[0]
        assert_equal(left[1], right[1])
        assert right[2] == [True, True, False, False]  # as the next step will need them


def test_checkpoints_and_whole_weights(tmp_path) -> None:
    def first(rank):
        engine, _ = make_engine(3, compile=EVERYTHING, **HARD)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return train(engine, rank, 2, first=2)

    def second(rank, options):
        engine, model = make_engine(3, seed=5, compile=options, **HARD)
        engine.load_checkpoint(tmp_path)
        losses = train(engine, rank, 2, first=2)
        values = weights(model)
        return losses, values, dict(engine.unshard().named_parameters())

    through = run_ranks(2, first)
    for options in ({}, EVERYTHING):
        for rank, (losses, values, whole) in enumerate(run_ranks(2, second, options)):
            assert losses == through[rank]
            assert whole["up.weight"].shape == (17, 12)
            assert values


def test_shared_weights_and_pieces_on_the_host_exclude_each_other() -> None:
    def fn(rank):
        config = settings(3, compile={"symmetric_memory": True})
        engine, *_ = torchloom.initialize(model=torch.nn.Linear(31, 33), config=config)
        with pytest.raises(ConfigError, match="exclude each other"):
            engine.compile(backend="aot_eager", passes=["zero3", "offload_parameters", "place"])

    run_ranks(2, fn)
