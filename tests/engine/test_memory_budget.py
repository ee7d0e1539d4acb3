"""`compile.memory_budget`: the measured peak stays under it, values stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import torchloom
from support.ranks import run_ranks
from support.zoo import llama
from torchloom.errors import PlanError
from torchloom.memory import measure_peak
from torchloom.plan import Plan


def config(stage: int, backend: str, budget, accumulation: int = 1) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "compile": {
            "deepcompile": True,
            "backend": backend,
            **({} if budget is None else {"memory_budget": budget}),
        },
    }


def run(stage, backend, budget, rank, accumulation=1, layers=2):
    """Train three steps; return losses, a weight, the plan and the peak of a micro-step."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, _ = llama(layers, 32, 4, 2)
    engine, *_ = torchloom.initialize(
        model=model, config=config(stage, backend, budget, accumulation)
    )
    engine.compile()
    generator = torch.Generator().manual_seed(rank)
    losses, peaks = [], []
    for step in range(3 * accumulation):
        ids = torch.randint(0, 131, (2, 61), generator=generator)

        def micro(ids=ids):
            loss = engine(ids)
            engine.backward(loss)
            return loss

        if step == 2 * accumulation:
            peaks.append(measure_peak(lambda micro=micro: losses.append(micro().item())).peak_bytes)
        else:
            losses.append(micro().item())
        engine.step()
    plan = engine.plan()
    return losses, plan.to_json(), peaks[0]


@pytest.mark.parametrize(
    "stage",
    [
        0,
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
        3,
    ],
)
def test_a_boxed_step_keeps_its_budget_and_its_values(stage: int) -> None:
    def fn(rank):
        free = run(stage, "aot_eager", "1GB", rank)
        plan = Plan.from_json(free[1])
        (graph,) = plan.graphs
        middle = (graph.peak_bytes + graph.min_peak_bytes) // 2
        tight = run(stage, "aot_eager", plan.base_bytes + middle, rank)
        return free, tight, plan.base_bytes

    for free, tight, base in run_ranks(2, fn):
        assert free[0] == tight[0]  # the same losses, bit for bit
        wide, small = Plan.from_json(free[1]), Plan.from_json(tight[1])
        assert small.peak_bytes <= small.budget_bytes < wide.peak_bytes
        assert small.graphs[0].recompute > wide.graphs[0].recompute
        for each in (wide, small):
            (graph,) = each.graphs
            added_us = graph.extra_us + graph.overhead_us
            assert 0 < graph.bound_us <= added_us  # collectives are never free
            assert graph.gap == (added_us - graph.bound_us) / (graph.compute_us + graph.bound_us)
        for losses, text, peak in (free, tight):
            predicted = Plan.from_json(text).graphs[0].peak_bytes
            assert peak == pytest.approx(predicted, rel=0.01), (stage, losses)
            assert peak + base <= Plan.from_json(text).budget_bytes


def test_what_does_not_fit_says_what_would() -> None:
    def fn(rank):
        with pytest.raises(PlanError, match=r"infeasible: compile.memory_budget is 1,000 bytes"):
            run(3, "aot_eager", 1000, rank)
        plan = Plan.from_json(run(3, "aot_eager", "1GB", rank)[1])
        (graph,) = plan.graphs
        with pytest.raises(PlanError, match=r"the minimum is [\d,]+\. Raise compile.memory_budget"):
            run(3, "aot_eager", plan.base_bytes + graph.min_peak_bytes // 2, rank)
        return True

    assert run_ranks(2, fn) == [True, True]


def test_inductor_recomputes_as_planned() -> None:
    def fn(rank):
        free = run(3, "inductor", "1GB", rank, layers=1)
        plan = Plan.from_json(free[1])
        (graph,) = plan.graphs
        # The code needs less than the graph, so this is below the peak of the code.
        budget = plan.base_bytes + graph.batch_bytes + graph.peak_bytes * 9 // 10
        return free, run(3, "inductor", budget, rank, layers=1)

    for free, tight in run_ranks(2, fn):
        assert tight[0] == pytest.approx(free[0], rel=1e-6)
        assert tight[2] < free[2]
        assert Plan.from_json(tight[1]).graphs[0].recompute


def small_engine(compile_section: dict, rank: int):
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, _ = llama(1, 32, 4, 2)
    section = {"deepcompile": True, "backend": "aot_eager", "strict": True, **compile_section}
    engine, *_ = torchloom.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
            "compile": section,
        },
    )
    engine.compile()
    return engine


def train(engine, rank: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = engine(torch.randint(0, 131, (2, 61), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_plan_from_a_file_is_followed(tmp_path) -> None:
    path = tmp_path / "plan.json"

    def fn(rank):
        engine = small_engine({"memory_budget": "1GB"}, rank)
        losses = train(engine, rank, 2)
        (wide,) = engine.plan().graphs
        middle = engine.plan().base_bytes + (wide.peak_bytes + wide.min_peak_bytes) // 2
        engine.destroy()
        engine = small_engine({"memory_budget": middle}, rank)
        train(engine, rank, 1)
        plan = engine.plan()
        (graph,) = plan.graphs
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
        pinned = small_engine({"plan": str(path)}, rank)
        assert train(pinned, rank, 2) == losses
        (followed,) = pinned.plan().graphs
        assert followed.decisions == edited
        assert graph.saved_bytes < wide.saved_bytes
        assert graph.saved_bytes <= followed.saved_bytes <= wide.saved_bytes
        assert graph.peak_bytes <= followed.peak_bytes <= wide.peak_bytes
        pinned.destroy()

        def refused(section, words):
            with pytest.raises(PlanError, match=words):
                train(small_engine(section, rank), rank, 1)

        base = plan.base_bytes
        refused(
            {"plan": str(path), "memory_budget": base + graph.min_peak_bytes // 2},
            r"the pinned plan of graph \w+ adds [\d,]+ bytes",
        )

        def refused_plan(wrong, words):
            if rank == 0:
                wrong.save(path)
            torch.distributed.barrier()
            refused({"plan": str(path)}, words)

        wrong = replace(plan, graphs=(replace(graph, graph="00ff"),))
        refused_plan(wrong, r"holds no graph \w+ \(it has 00ff\)")
        unknown = (replace(edited[0], value="no_such_value", action="recompute"),)
        wrong = replace(plan, graphs=(replace(graph, decisions=unknown),))
        refused_plan(wrong, "computes 'no_such_value' again")
        refused_plan(replace(plan, world_size=8), "made for 8 ranks, the run has 2")
        return True

    assert run_ranks(2, fn) == [True, True]
