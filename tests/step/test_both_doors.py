"""`engine.compile()` and `torchloom.compile(model, config=..., optimizer=...)` build the same step."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchloom
from support.models import SMALL_BUCKETS, Deep
from support.ranks import run_ranks
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


def by_engine(rank: int, folder: Path):
    return {name: one_by_engine(rank, case, folder / name) for name, case in CASES.items()}


def one_by_engine(rank, compiling, folder):
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {**ZERO, "stage3_param_persistence_threshold": 100},
        "compile": {"backend": "aot_eager", "dump_graphs": str(folder), **compiling},
    }
    engine, *_ = torchloom.initialize(model=model_of(), config=config)
    engine.compile()
    losses = []
    for step in range(4):
        loss = loss_of(engine, step, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = engine.plan(), losses, described(engine.compile_report())
    engine.destroy()
    del engine, loss
    start_over()
    return found


def by_own_loop(rank: int, folder: Path):
    return {name: one_by_own_loop(rank, case, folder / name) for name, case in CASES.items()}


def one_by_own_loop(rank, compiling, folder):
    model = torchloom.shard_model(model_of(), stage=3, persistence_threshold=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    compiling = {"backend": "aot_eager", "dump_graphs": str(folder), **compiling}
    config = {"compile": compiling, "zero_optimization": ZERO}
    session = torchloom.compile(model, config=config, optimizer=optimizer)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = session.plan(), losses, described(session.report)
    del model, optimizer, session, loss
    start_over()
    return found


def start_over() -> None:
    torch._dynamo.reset()
    gc.collect()


def described(report):
    assert report.fallbacks == []
    return [(graph.collectives, graph.num_nodes) for graph in report.graphs]


def texts_in(folder: Path) -> dict[str, str]:
    """Return the dumped graphs; communicators are numbered in the order in which a process makes them."""
    return {
        path.name: re.sub(r"\d+x\d+#[^',]*", "ranks", path.read_text())
        for path in sorted(folder.iterdir())
    }


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    with pytest.MonkeyPatch.context() as patch:  # what one door measures is not the other's
        patch.setenv("TORCHLOOM_CACHE_DIR", str(folder / "engine costs"))
        engine = run_ranks(2, by_engine, folder / "engine", timeout_s=500)
        patch.setenv("TORCHLOOM_CACHE_DIR", str(folder / "own costs"))
        own = run_ranks(2, by_own_loop, folder / "own", timeout_s=500)
    return engine, own, folder


@pytest.mark.parametrize("name", CASES)
def test_equal_plans_graphs_and_losses(doors, name) -> None:
    engine, own, folder = doors
    for rank in range(2):
        plan, losses, graphs = engine[rank][name]
        own_plan, own_losses, own_graphs = own[rank][name]
        assert own_losses == losses
        assert own_plan.base_bytes == plan.base_bytes
        if name != "replanned":  # times are measured, so the second plan may be another one
            assert own_graphs == graphs
            assert own_plan == plan
        assert bool(plan.graphs) == ("memory_budget" in CASES[name])
    if name != "replanned":
        assert texts_in(folder / "own" / name) == texts_in(folder / "engine" / name)


def test_what_the_cases_are_for_has_happened(doors) -> None:
    _, own, _ = doors
    plans = {name: own[0][name][0] for name in CASES}
    assert plans["roomy"].graphs[0].resident
    assert plans["tight"].graphs[0].recompute
    assert "forward torchloom.offload_start" in own[0]["activations"][2][0][0]
    assert "forward torchloom.reload_start" in own[0]["parameters"][2][0][0]
    assert "forward torchloom.symmetric_start" in own[0]["shared"][2][0][0]
    assert len(own[0]["schedule"][2]) == 2
    losses = [tuple(each[1]) for each in own[0].values()]
    assert len({loss[0] for loss in losses}) == 1


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
