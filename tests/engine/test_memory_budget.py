"""`compile.memory_budget`: the measured peak stays under it, values stay the same."""

from __future__ import annotations

import pytest
import torch

import torchloom
from support.ranks import run_ranks
from support.zoo import llama
from torchloom.errors import PlanError
from torchloom.plan import Plan
from torchloom.plan.memory import measure_peak


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


def run(stage, backend, budget, rank, accumulation=1):
    """Train three steps; return losses, a weight, the plan and the peak of a micro-step."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, _ = llama(3, 32, 4, 2)
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
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
        assert small.graphs[0].bound_us <= small.graphs[0].extra_us
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
        free = run(3, "inductor", "1GB", rank)
        plan = Plan.from_json(free[1])
        (graph,) = plan.graphs
        middle = (graph.peak_bytes + graph.min_peak_bytes) // 2
        tight = run(3, "inductor", plan.base_bytes + middle, rank)
        return free, tight

    for free, tight in run_ranks(2, fn):
        assert tight[0] == pytest.approx(free[0], rel=1e-6)
        assert tight[2] < free[2]
        assert Plan.from_json(tight[1]).graphs[0].recompute
