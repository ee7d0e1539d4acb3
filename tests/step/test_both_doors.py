"""`engine.compile()` and `torchloom.compile(model, config=..., optimizer=...)` build the same step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchloom
from support.models import SMALL_BUCKETS, Deep
from support.pool import run_ranks
from torchloom.errors import ConfigError, ShardError

ZERO = {"stage": 3, **SMALL_BUCKETS}
CASES: dict[str, dict[str, Any]] = {
    "preset": {},
    "roomy": {"memory_budget": 10**9, "replan_step": 0},
    "tight": {"memory_budget": 380_000, "replan_step": 0},
    "replanned": {"memory_budget": 380_000, "replan_step": 1},
    "activations": {"offload_activation": True, "offload_activation_threshold": 1},
    "parameters": {"offload_parameters": True},
    "shared": {"symmetric_memory": True},
    "schedule": {"schedule": [[0, ["zero3_compile"]], [1, ["zero3_compile", "prefetch"]]]},
}


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return Deep()


def loss_of(model, step: int, rank: int):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(64, 37, generator=generator))


def by_engine(rank: int, name: str, folder: Path):
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {**ZERO, "stage3_param_persistence_threshold": 100},
        "compile": {"backend": "aot_eager", "dump_graphs": str(folder), **CASES[name]},
    }
    engine, *_ = torchloom.initialize(model=model_of(), config=config)
    engine.compile()
    losses = []
    for step in range(4):
        loss = loss_of(engine, step, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine.plan(), losses, described(engine.compile_report())


def by_own_loop(rank: int, name: str, folder: Path):
    model = torchloom.shard_model(model_of(), stage=3, persistence_threshold=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    compiling = {"backend": "aot_eager", "dump_graphs": str(folder), **CASES[name]}
    config = {"compile": compiling, "zero_optimization": ZERO}
    session = torchloom.compile(model, config=config, optimizer=optimizer)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return session.plan(), losses, described(session.report)


def described(report):
    assert report.fallbacks == []
    return [(graph.collectives, graph.num_nodes) for graph in report.graphs]


def texts_in(folder: Path) -> dict[str, str]:
    """Return the dumped graphs; communicators are numbered in the order in which a process makes them."""
    return {
        path.name: re.sub(r"\d+x\d+#[^',]*", "ranks", path.read_text())
        for path in sorted(folder.iterdir())
    }


def has_happened(name: str, plan, graphs) -> bool:
    """Say whether a run did what its case is for."""
    counted = graphs[0][0]
    return {
        "preset": lambda: not plan.graphs,
        "roomy": lambda: plan.graphs[0].resident,
        "tight": lambda: plan.graphs[0].recompute,
        "replanned": lambda: plan.graphs[0].recompute,
        "activations": lambda: "forward torchloom.offload_start" in counted,
        "parameters": lambda: "forward torchloom.reload_start" in counted,
        "shared": lambda: "forward torchloom.symmetric_start" in counted,
        "schedule": lambda: len(graphs) == 2,
    }[name]()


@pytest.mark.parametrize("name", CASES)
def test_equal_plans_graphs_and_losses(tmp_path, monkeypatch, name) -> None:
    doors = {}
    for door in (by_engine, by_own_loop):  # what one measures is not the other's
        monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path / f"costs of {door.__name__}"))
        doors[door] = run_ranks(2, door, name, tmp_path / door.__name__, timeout_s=300)
    for rank, (of_engine, of_own_loop) in enumerate(zip(*doors.values(), strict=True)):
        plan, losses, graphs = of_engine
        own_plan, own_losses, own_graphs = of_own_loop
        assert own_losses == losses
        assert losses[0] == pytest.approx(loss_of(model_of(), 0, rank).item(), rel=1e-6)
        assert own_plan.base_bytes == plan.base_bytes
        if name != "replanned":  # times are measured, so the second plan may be another one
            assert own_graphs == graphs
            assert own_plan == plan
        assert bool(plan.graphs) == ("memory_budget" in CASES[name])
        assert has_happened(name, own_plan, own_graphs)
    if name != "replanned":
        by_both = [texts_in(tmp_path / door.__name__) for door in doors]
        assert by_both[0] == by_both[1]


def refused(rank, arguments):
    model = torchloom.shard_model(model_of(), stage=3)
    try:
        torchloom.compile(model, **arguments)
    except (ConfigError, ShardError) as refusal:
        return str(refusal)
    return "was taken"


OTHERS = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": OTHERS}, "steps none of this model's parameters"),
        ({"optimizer": torch.optim.SGD}, "pass a torch optimizer"),
        (
            {"memory_budget": "40GB"},
            "write torchloom.compile(model, config={'memory_budget': '40GB'})",
        ),
        ({"config": {"memory_budget": "40GB"}}, "counts optimizer states: pass optimizer="),
        ({"config": {"plan": "plan.json"}}, "may keep weights gathered until the optimizer steps"),
        ({"config": {"offload_opt_states": True}}, "a loop of one's own does not call: remove it"),
        (
            {"config": {"zero_optimization": {"stage": 2}}},
            "is 2, but this model is sharded at stage 3",
        ),
    ],
)
def test_what_an_own_loop_cannot_keep_is_refused(arguments, words) -> None:
    assert words in run_ranks(1, refused, arguments, timeout_s=200)[0]
