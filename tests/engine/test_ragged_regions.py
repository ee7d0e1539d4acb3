"""Ranks whose batches differ in size follow one plan, as one body or each layer on its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

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


def without_choices(self: Planner, problem: PlanningProblem) -> GraphPlan:
    if problem.parts:
        raise RegionError("no choice about equal parts keeps the memory budget")
    return plan_of(self, problem)


plan_of = Planner.plan


def test_all_ranks_compile_the_form_of_graph_that_the_leader_compiles(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    def run(rank: int) -> tuple[Run, Run, Run, Run]:
        free = train(llama(rank), rank, budget=BOUNDLESS, regions=False)
        budget = budget_of(free)
        bodies = train(llama(rank), rank, budget=budget)
        with mock.patch.object(Planner, "plan", without_choices) if rank == 0 else nullcontext():
            flat = train(llama(rank), rank, budget=budget)
        if rank == 0:  # whose batch is the longer one
            path.write_text(flat.json)
        torch.distributed.barrier()
        return free, bodies, flat, train(llama(0), rank, budget=budget, plan=str(path))

    longer, shorter = run_ranks(2, run, timeout_s=500)
    for free, bodies, flat, _ in (longer, shorter):
        assert free.losses == bodies.losses == flat.losses
        assert bodies.calls == [4] and flat.calls == []
        assert not flat.plan.calls_bodies
    for one, other in zip(longer[1:3], shorter[1:3], strict=True):
        assert one.plan.traffic_key == other.plan.traffic_key
        # Attention operators return a tuple, which a plan for another length names as well.
        again = [each.op for each in one.plan.decisions if each.action == "recompute"]
        assert any("attention" in op for op in again)
    for *_, followed in (longer, shorter):
        assert followed.calls == []
        assert followed.reasons[-1] == "the pinned plan is for the whole graph"
        assert followed.plan.recompute == longer[2].plan.recompute
    assert longer[3].losses[0] == longer[2].losses[0]
