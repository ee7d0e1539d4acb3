"""A watched run under a budget: its plan, what is alive at the peak, what stands between steps."""

from __future__ import annotations

import torch
from torch import nn

import torchloom
from support.pool import run_ranks
from torchloom.records import from_json, to_json

WIDTH = 64
BUDGET = "1300kB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh().sin())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def watched(rank: int, budget: str | None, accumulation: int) -> dict:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "compile": {"enabled": True, "backend": "aot_eager"},
    }
    if budget is not None:
        config["compile"]["memory_budget"] = budget
    engine = torchloom.initialize(model=Model(), config=config)[0]
    with torchloom.watch() as w:  # the engine is compiled already: what stands is told all the same
        for _ in range(2 * accumulation):
            loss = engine(torch.randn(32, WIDTH))
            engine.backward(loss)
            engine.step()
    assert len(torchloom.entries(engine.module)) == 1  # an engine can be asked, too
    return to_json(w.record)


def test_a_run_under_a_budget_is_recorded_with_its_plan_and_memory() -> None:
    record = from_json(run_ranks(2, watched, BUDGET, 2)[0])
    (standing,), (plan,), (peak,) = record.standing, record.plans, record.peaks
    assert standing.budget_bytes == 1_300_000
    parts = {(each.kind, each.layer): each.num_bytes for each in standing.parts}
    weight = parts["parameters", "layers.1.up"]
    assert (
        parts["optimizer states", "layers.1.up"] == 2 * weight + 2 * 4
    )  # two parameters' counts of steps
    assert parts.get(("gradients", "layers.1.up"), 0) == weight
    assert 0 <= standing.base_bytes - sum(parts.values()) < 20_000  # the reserve
    assert plan.graph == peak.graph == "graph0"
    assert plan.peak_bytes <= plan.budget_bytes <= standing.budget_bytes - standing.base_bytes
    assert (plan.num_tries, plan.planning_s > 0) == (1, True)
    assert {each.action for each in plan.decisions} >= {"recompute"}
    assert peak.peak_bytes == plan.graph_peak_bytes == sum(each.num_bytes for each in peak.alive)
    assert {each.kind for each in peak.alive} >= {"activations", "gradients"}
    assert any(each.layer.startswith("layers.") for each in peak.alive)


def test_a_run_without_a_budget_tells_its_peak_and_what_collectives_are_for() -> None:
    record = from_json(run_ranks(2, watched, None, 1)[0])
    (standing,), (peak,) = record.standing, record.peaks
    assert record.plans == []
    assert standing.budget_bytes is None
    assert peak.peak_bytes == sum(each.num_bytes for each in peak.alive) > 0
    moves = [row.data for row in record.events if row.kind == "CollectiveRan"]
    named = {name for row in moves for name in row["params"]}
    assert {"layers.0.up.weight", "layers.2.down.bias"} <= named
    assert all(len(row["params"]) == row["num_tensors"] for row in moves)
    lowered = [row.data["lowered"] for row in record.events if row.kind == "LoweredCompiled"]
    assert sorted(lowered) == ["backward", "forward"]
