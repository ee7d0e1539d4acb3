"""Training with chosen kernels: the same losses, equal graphs on all ranks, warm second starts.

Which implementation is faster depends on the machine, so these tests choose by a margin that makes
every product take the other one.
"""

from __future__ import annotations

import os

import pytest
import torch

from support.runs import make_engine, train
from torchloom._torch.dynamo import compile_counters
from torchloom._torch.onednn import has_onednn_linear
from torchloom.graph import PassContext
from torchloom.passes import PASSES
from torchloom.pipeline import CompileSession
from torchloom.plan.costs import kernels

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="torch without oneDNN")
STEPS = 4
TOLERANCE = 1e-5
"""Relative difference of losses over a few steps; each product differs by at most 4x its error."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path / "costs"))
    monkeypatch.setattr(kernels, "MARGIN", 1e9)
    return tmp_path


def run(rank, stage, backend, compile_section, margin_of_rank_1=None, cache=None):
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    if rank == 1 and margin_of_rank_1 is not None:
        kernels.MARGIN = margin_of_rank_1
    torch._dynamo.reset()
    compile_counters().clear()
    engine, _ = make_engine(stage, compile={"strict": True, **compile_section})
    engine.compile(backend=backend)
    losses = train(engine, rank, STEPS)
    edits = {
        each.graph.partition(".")[2]: each.num_edits
        for graph in engine.compile_report().graphs
        for each in graph.passes
        if each.name == "choose_kernels"
    }
    counters = {kind: dict(c) for kind, c in compile_counters().items()}
    return losses, edits, counters


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_the_default(run_ranks, stage) -> None:
    default = run_ranks(2, run, stage, "aot_eager", {}, timeout_s=300)
    chosen = run_ranks(2, run, stage, "aot_eager", {"choose_kernels": True}, timeout_s=300)
    for (losses, edits, _), (wanted, none, _) in zip(chosen, default, strict=True):
        assert none == {}
        assert edits["forward"] >= 3
        assert edits["backward"] >= 5
        assert losses == pytest.approx(wanted, rel=TOLERANCE)
        assert losses[-1] != losses[0]


def test_one_rank_chooses_for_all(run_ranks) -> None:
    """Left alone, rank 0 would choose at least three products and rank 1 none."""
    on = {"choose_kernels": True}
    results = run_ranks(2, run, 3, "aot_eager", on, 0.0, timeout_s=300)
    assert results[0][1] == results[1][1]


def test_off_by_name(run_ranks) -> None:
    off = {"choose_kernels": True, "disable_passes": ["choose_kernels"]}
    assert all(edits == {} for _, edits, _ in run_ranks(2, run, 3, "aot_eager", off, timeout_s=300))


def test_a_second_start_measures_and_compiles_nothing(run_ranks, tmp_path, monkeypatch) -> None:
    on, cache = {"choose_kernels": True}, tmp_path / "inductor"
    cold = run_ranks(2, run, 3, "inductor", on, None, cache, timeout_s=500)
    monkeypatch.setattr(kernels, "medians_us", None)  # measuring would fail
    monkeypatch.setattr(kernels, "find_products", None)
    warm = run_ranks(2, run, 3, "inductor", on, None, cache, timeout_s=500)
    for (losses, _, _), (again, edits, counters) in zip(cold, warm, strict=True):
        assert edits == {}  # no pass ran
        assert counters["inductor"]["fxgraph_cache_hit"] == 2
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        assert again == losses


def test_other_choices_are_other_graphs_for_the_caches() -> None:
    keys = set()
    for chosen in ((), (("matmul f32 4x6x8 nt", "onednn"),), (("matmul f32 4x6x8 nn", "onednn"),)):
        context = PassContext(world_size=2, kernels=chosen)
        keys.add(CompileSession(passes=(PASSES["choose_kernels"],), context=context).round_key)
    assert len(keys) == 3
