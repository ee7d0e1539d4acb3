"""Batches of ranks may differ in size under a memory budget: what the ranks send stays the same."""

from __future__ import annotations

import pytest
import torch

from support.models import SMALL_BUCKETS, Deep
from support.pool import run_ranks
from support.runs import ADAMW, micro_step, sharded
from torchloom.errors import AgreementError
from torchloom.plan import Plan

ACCUMULATION = 2


def train(rank: int, rows, stage: int, budget=None, **options) -> tuple[list[float], Plan | None]:
    """Train a step on each row of sizes; return the losses of this rank and the plans of its graphs."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    section = {"deepcompile": True, "backend": "aot_eager", "strict": True, **options}
    if budget is not None:
        section["memory_budget"] = budget
    engine = sharded(
        Deep(),
        stage,
        batch=2,
        optimizer=ADAMW,
        zero=SMALL_BUCKETS,
        gradient_accumulation_steps=ACCUMULATION,
        compile=section,
    )
    engine.compile()
    generator = torch.Generator().manual_seed(rank)
    losses = [
        micro_step(engine, torch.randn(sizes[rank], 37, generator=generator))
        for sizes in rows
        for _ in range(ACCUMULATION)
    ]
    return losses, engine.plan() if budget is not None else None


def budget_for(rank: int, num_rows: int, stage: int, part: float) -> int:
    """Return a budget between the least that a batch needs and what it takes with room for all."""
    plan = train(rank, [(num_rows, num_rows)], stage, "1GB")[1]
    assert plan is not None
    (graph,) = plan.graphs
    least = plan.base_bytes + graph.batch_bytes + graph.min_peak_bytes
    most = plan.base_bytes + graph.batch_bytes + graph.peak_bytes + graph.beside_bytes
    return int(least + part * (most - least))


DIFFER_AT_FIRST = [(64, 23), (64, 23), (31, 64)]
DIFFER_LATER = [(64, 64), (64, 23), (31, 64)]


@pytest.mark.parametrize("rows", [DIFFER_AT_FIRST, DIFFER_LATER], ids=["at first", "later"])
@pytest.mark.parametrize(
    ("stage", "part"),
    [
        (3, 0.1),
        pytest.param(3, 0.5, marks=pytest.mark.exhaustive),
        pytest.param(3, 0.9, marks=pytest.mark.exhaustive),
        pytest.param(1, 0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_with_other_batches_train_under_a_budget(stage: int, rows, part: float) -> None:
    def fn(rank):
        budget = budget_for(rank, 64, stage, part)
        return train(rank, rows, stage)[0], train(rank, rows, stage, budget)[0]

    for free, tight in run_ranks(2, fn):
        assert tight == pytest.approx(free, rel=1e-6)


@pytest.mark.parametrize(
    "rows",
    [DIFFER_AT_FIRST, pytest.param(DIFFER_LATER, marks=pytest.mark.exhaustive)],
    ids=["at first", "later"],
)
def test_graphs_whose_sizes_are_symbols_follow_as_well(rows) -> None:
    def fn(rank):
        budget = budget_for(rank, 64, 3, 0.4)
        free = train(rank, rows, 3, backend="inductor")[0]
        return free, train(rank, rows, 3, budget, backend="inductor")[0]

    for free, tight in run_ranks(2, fn):
        assert tight == pytest.approx(free, rel=1e-6)


def test_a_batch_that_outgrows_the_shared_plan_on_one_rank_says_so() -> None:
    def fn(rank):
        budget = budget_for(rank, 23, 3, 0.5)
        free = train(rank, [(23, 23), (29, 29)], 3)[0]
        together = train(rank, [(23, 23), (29, 29)], 3, budget)[0]  # all ranks plan anew alike
        # A plan that decides about whole layers leaves some room, so much larger.
        with pytest.raises(AgreementError) as caught:
            train(rank, [(23, 23), (53, 23), (23, 23)], 3, budget)
        return together, free, str(caught.value)

    for together, free, text in run_ranks(2, fn):
        assert together == pytest.approx(free, rel=1e-6)
        assert "raise compile.memory_budget, or begin with the largest batch" in text
