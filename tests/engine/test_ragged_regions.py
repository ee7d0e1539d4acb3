"""Ranks whose batches differ in size follow one plan, as one body or each layer on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.test_planned_regions import BOUNDLESS, Run, train
from support import zoo
from support.pool import run_ranks
from torchloom.errors import RegionError
from torchloom.plan import GraphPlan, Planner
from torchloom.plan.problem import PlanningProblem

LENGTHS = (61, 47)


def llama(rank: int) -> Callable[[], Any]:
    """Return what makes a model with attention, and a batch of this rank's length."""

    def make() -> Any:
        model = zoo.llama(layers=4, dim=32, heads=4, kv_heads=2)[0]
        return model, (torch.randint(0, 131, (2, LENGTHS[rank])),)

    return make


def budget_of(free: Run) -> int:
    """Return a budget that the longer batch keeps by computing all it can again: equal on all ranks."""
    least = free.whole_bytes - free.plan.peak_bytes + free.plan.min_peak_bytes
    found = torch.tensor([1.02 * least])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)


@pytest.mark.parametrize(
    "regions",
    [pytest.param(False, marks=pytest.mark.exhaustive), True],
    ids=["flat", "bodies"],
)
def test_attention_is_computed_again_on_all_ranks(regions: bool) -> None:
    def run(rank: int) -> tuple[Run, Run]:
        free = train(llama(rank), rank, budget=BOUNDLESS, regions=False)
        return free, train(llama(rank), rank, budget=budget_of(free), regions=regions)

    (free, longer), (other, shorter) = run_ranks(2, run, timeout_s=500)
    assert (free.losses, other.losses) == (longer.losses, shorter.losses)
    # Attention operators return a tuple, which a plan for another length names as well.
    attention = [each.op for each in longer.plan.decisions if each.action == "recompute"]
    assert any("attention" in op for op in attention)
    assert longer.plan.traffic_key == shorter.plan.traffic_key
    assert longer.calls == shorter.calls == ([4] if regions else [])


def without_choices(self: Planner, problem: PlanningProblem) -> GraphPlan:
    if problem.parts:
        raise RegionError("no choice about equal parts keeps the memory budget")
    return plan_of(self, problem)


plan_of = Planner.plan


def test_all_ranks_compile_the_form_of_graph_that_the_leader_compiles() -> None:
    def run(rank: int) -> tuple[Run, Run]:
        free = train(llama(rank), rank, budget=BOUNDLESS, regions=False)
        budget = budget_of(free)
        if rank != 0:
            return free, train(llama(rank), rank, budget=budget)
        with mock.patch.object(Planner, "plan", without_choices):
            return free, train(llama(rank), rank, budget=budget)

    for free, bound in run_ranks(2, run, timeout_s=500):
        assert bound.calls == []
        assert bound.losses == free.losses
        assert not bound.plan.calls_bodies


def test_a_plan_of_whole_graphs_is_followed_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def run(rank: int) -> tuple[Run, Run]:
        free = train(llama(0), rank, budget=BOUNDLESS, regions=False)
        budget = budget_of(free)
        made = train(llama(0), rank, budget=budget, regions=False)
        if rank == 0:
            path.write_text(made.json)
        torch.distributed.barrier()
        return made, train(llama(0), rank, budget=budget, plan=str(path))

    for made, followed in run_ranks(2, run, timeout_s=500):
        assert followed.calls == []
        assert followed.reasons[-1] == "the pinned plan is for the whole graph"
        assert followed.plan.recompute == made.plan.recompute != frozenset()
        assert followed.losses == made.losses
