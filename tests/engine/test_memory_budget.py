"""`compile.memory_budget`: what does not fit is told, and a plan from a file is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.ranks import run_ranks
from support.runs import ADAMW, micro_step, sharded
from support.zoo import llama
from torchloom.engine import Engine
from torchloom.errors import PlanError


def test_what_does_not_fit_says_what_would() -> None:
    def fn(rank):
        with pytest.raises(PlanError, match=r"infeasible: compile.memory_budget is 1,000 bytes"):
            train(engine_of(memory_budget=1000), rank, 1)
        ample = engine_of(memory_budget="1GB")
        train(ample, rank, 1)
        (graph,) = ample.plan().graphs
        too_little = ample.plan().base_bytes + graph.min_peak_bytes // 2
        with pytest.raises(PlanError, match=r"the minimum is [\d,]+\. Raise compile.memory_budget"):
            train(engine_of(memory_budget=too_little), rank, 1)

    run_ranks(2, fn)


def engine_of(**compiling) -> Engine:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, _ = llama(1, 32, 4, 2)
    compiling = {"backend": "aot_eager", "strict": True, **compiling}
    engine = sharded(model, batch=2, optimizer=ADAMW, compile=compiling)
    engine.compile()
    return engine


def train(engine: Engine, rank: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    batches = (torch.randint(0, 131, (2, 61), generator=generator) for _ in range(steps))
    return [micro_step(engine, batch) for batch in batches]


def test_a_plan_from_a_file_is_followed(tmp_path) -> None:
    path = tmp_path / "plan.json"

    def fn(rank):
        engine = engine_of(memory_budget="1GB")
        losses = train(engine, rank, 2)
        (wide,) = engine.plan().graphs
        middle = engine.plan().base_bytes + (wide.peak_bytes + wide.min_peak_bytes) // 2
        engine.destroy()
        engine = engine_of(memory_budget=middle)
        train(engine, rank, 1)
        plan = engine.plan()
        (graph,) = plan.graphs
        added_us = graph.extra_us + graph.overhead_us
        assert 0 < graph.bound_us <= added_us  # collectives are never free
        assert graph.gap == (added_us - graph.bound_us) / (graph.compute_us + graph.bound_us)
        engine.destroy()
        # By hand: half of what the budget made the planner drop is kept after all.
        changed = sorted(graph.recompute - wide.recompute)
        edited = tuple(
            replace(each, action="keep") if each.value in changed[::2] else each
            for each in graph.decisions
        )
        if rank == 0:
            replace(plan, graphs=(replace(graph, decisions=edited),)).save(path)
        torch.distributed.barrier()
        pinned = engine_of(plan=str(path))
        assert train(pinned, rank, 2) == losses
        (followed,) = pinned.plan().graphs
        assert followed.decisions == edited
        assert graph.saved_bytes < wide.saved_bytes
        assert graph.saved_bytes <= followed.saved_bytes <= wide.saved_bytes
        assert graph.peak_bytes <= followed.peak_bytes <= wide.peak_bytes
        pinned.destroy()

        def refused(words, **compiling):
            with pytest.raises(PlanError, match=words):
                train(engine_of(plan=str(path), **compiling), rank, 1)

        too_little = plan.base_bytes + graph.min_peak_bytes // 2
        refused(r"the pinned plan of graph \w+ adds [\d,]+ bytes", memory_budget=too_little)

        def refused_plan(wrong, words):
            if rank == 0:
                wrong.save(path)
            torch.distributed.barrier()
            refused(words)

        wrong = replace(plan, graphs=(replace(graph, graph="00ff"),))
        refused_plan(wrong, r"holds no graph \w+ \(it has 00ff\)")
        unknown = (replace(edited[0], value="no_such_value", action="recompute"),)
        wrong = replace(plan, graphs=(replace(graph, decisions=unknown),))
        refused_plan(wrong, "computes 'no_such_value' again")
        refused_plan(replace(plan, world_size=8), "made for 8 ranks, the run has 2")
        return True

    assert run_ranks(2, fn) == [True, True]
