"""The frontier under random budgets, and its smallest plan beside checkpoints set by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.planned import Captured
from support.zoo import ZOO, llama
from torchloom.costs import CostTable, node_us
from torchloom.graph import Choices, droppable
from torchloom.memory import WorkspaceTable, measure_peak
from torchloom.memory.joint import joint_model
from torchloom.plan import Planner, PlanningProblem
from torchloom.plan.frontier import MemorySource, frontier

MODELS = [
    "mlp",
    "llama_deep",
    "gpt2_tied",
    "mixtral",
    "vit",
    "conv",
    "unet",
    "gru",
    "lora",
    "frozen",
]
NUM_BUDGETS = 100


def search(graph, num_results):
    workspaces = WorkspaceTable()
    workspaces.probe(graph.nodes)
    model = joint_model(graph, num_results, workspaces)
    may_drop = droppable(graph)
    indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
    table = CostTable()
    costs = [
        0.0 if is_input else node_us(node, table)
        for node, is_input in zip(model.nodes, model.is_input, strict=True)
    ]
    return model, frontier(model, indices, costs)


@pytest.mark.parametrize("name", MODELS)
def test_budgets_are_kept_and_peaks_fall_with_them(name: str) -> None:
    torch.manual_seed(11)
    graph, num_results = Captured(*ZOO[name]()).to_plan()
    _, found = search(graph, num_results)
    least, most = found.min_peak_bytes, found.points[0].peak_bytes
    draw = random.Random(name)
    budgets = sorted(draw.uniform(0.9 * least, 1.1 * most) for _ in range(NUM_BUDGETS))
    before = 0
    for budget in map(int, budgets):
        point = found.within(budget)
        if point is None:
            assert budget < least
            continue
        assert before <= point.peak_bytes <= budget
        bound = found.bound_us(budget)
        assert bound <= point.extra_us + 1e-9
        free = found.bound_us(budget, sources=[MemorySource(0.0, least / 4)])
        assert free == pytest.approx(found.bound_us(int(budget + least / 4)), rel=1e-3, abs=1e-3)
        assert free <= found.bound_us(budget, sources=[MemorySource(1e-5, least / 4)]) <= bound
        assert found.bound_us(budget, sources=[MemorySource(1e9, least)]) == bound
        before = point.peak_bytes


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_points_are_measured_as_predicted(name: str) -> None:
    torch.manual_seed(12)
    found = Captured(*ZOO[name]())
    graph, num_results = found.to_plan()
    model, searched = search(graph, num_results)
    points = searched.points
    for point in (points[0], points[len(points) // 2], points[-1]):
        names = frozenset(model.nodes[i].name for i in point.dropped)
        planned = found.planned(Choices(recompute=names))
        found.drop_gradients()
        assert measure_peak(planned.step).peak_bytes == point.peak_bytes


def measured_at_least(found: Captured) -> int:
    """Return the measured peak of the smallest plan, which is what was predicted."""
    graph, num_results = found.to_plan()
    problem = PlanningProblem(joint=graph, num_results=num_results)
    least = Planner(1 << 40).plan(problem).min_peak_bytes
    tight = Planner(least).plan(problem)
    planned = found.planned(Choices(recompute=tight.recompute))
    found.drop_gradients()
    measured = measure_peak(planned.step).peak_bytes
    assert measured == tight.peak_bytes == least
    return measured


def test_the_smallest_plan_needs_no_more_than_a_checkpoint_per_block() -> None:
    torch.manual_seed(13)
    ours = measured_at_least(Captured(*llama(6, 32, 4, 4)))

    class Checkpointed(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    torch.manual_seed(13)
    model, batch = llama(6, 32, 4, 4)
    model.blocks = torch.nn.ModuleList(Checkpointed(block) for block in model.blocks)
    by_hand = Captured(model, batch).planned(None)
    by_hand.step()
    model.zero_grad(set_to_none=True)
    theirs = measure_peak(by_hand.step).peak_bytes
    assert ours <= 1.02 * theirs


def test_the_smallest_plan_needs_half_of_what_torch_does_with_its_best_setting() -> None:
    torch.manual_seed(14)
    model, _ = llama(6, 96, 4, 4)
    batch = (torch.randint(0, 131, (4, 96)),)
    found = Captured(model, batch)
    ours = measured_at_least(found)
    theirs = []
    for share in (0.05, 0.1, 0.2, 0.5):
        with torch._functorch.config.patch(activation_memory_budget=share):
            by_torch = found.planned(None)
        found.drop_gradients()
        theirs.append(measure_peak(by_torch.step).peak_bytes)
    assert ours <= 0.5 * min(theirs), (ours, theirs)
