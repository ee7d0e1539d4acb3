"""A warm start re-runs no pass and compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import torchloom
from support.models import tokens
from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom.graph import GraphPass
from torchloom.pipeline.keys import identity_of


def one_start(rank, cache, settings):
    """Train in a process of its own; return passes run, cache counters and losses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine, _ = make_engine(**settings)
    engine.compile()
    losses = train(engine, rank, 2)
    graphs = engine.compile_report().graphs
    # What Dynamo captured is rewritten before caches are asked.
    passes = [p.name for each in graphs for p in each.passes if not p.graph.endswith(".captured")]
    counters = {kind: dict(c) for kind, c in torch._dynamo.utils.counters.items()}
    woven = engine.compile_report().graphs[0].collectives
    return passes, counters["inductor"], counters["aot_autograd"], losses, woven


def test_second_start_runs_no_pass(tmp_path) -> None:
    cold = run_ranks(2, one_start, tmp_path, {}, timeout_s=300)
    warm = run_ranks(2, one_start, tmp_path, {}, timeout_s=300)
    for first, again in zip(cold, warm, strict=True):
        assert "zero3" in first[0] or first[2].get("autograd_cache_hit")  # the peer was quicker
        assert again[0] == []
        assert again[1]["fxgraph_cache_hit"] == 2
        assert again[2]["autograd_cache_hit"] == 1
        assert "fxgraph_cache_bypass" not in again[1]
        assert again[3] == first[3]
        assert again[4]["forward torchloom.gather_start"] == 1
        assert again[4]["backward torchloom.reduce_start"] == 1
    # A rank that is late finds forward and backward, and not yet the two together.
    shutil.rmtree(tmp_path / "aotautograd")
    late = run_ranks(2, one_start, tmp_path, {}, timeout_s=300)[0]
    assert late[1]["fxgraph_cache_hit"] == 2
    assert late[3:] == warm[0][3:]


def both_ways(rank, cache):
    """Train and evaluate on two sizes of batches; return what the report says of each graph."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch._dynamo.reset()
    engine, _ = make_engine(compile={"memory_budget": "1MB"})
    engine.compile(compile_kwargs={"dynamic": False})
    for rows in (3, 5):
        engine.backward(engine(tokens(0, rank, rows)))
        engine.step()
    with torch.no_grad():
        engine(tokens(0, rank, rows))
    graphs = engine.compile_report().graphs
    return [(each.collectives, each.plan and each.plan.peak_bytes, each.passes) for each in graphs]


def test_each_code_of_one_graph_is_remembered_for_itself(tmp_path) -> None:
    cold = run_ranks(2, both_ways, tmp_path, timeout_s=300)[0]
    warm = run_ranks(2, both_ways, tmp_path, timeout_s=300)[0]
    assert not any(passes for *_, passes in warm)
    (few, few_peak, _), (more, more_peak, _), (inference, none, _) = warm
    assert few == more
    assert few["backward torchloom.reduce_start"] == 1
    assert few_peak < more_peak
    assert none is None
    assert inference["inference torchloom.gather_start"] == 1
    assert not any(name.startswith("backward") for name in inference)
    assert [each[:2] for each in cold] == [each[:2] for each in warm]
    shutil.rmtree(tmp_path / "aotautograd")  # as a rank finds them that is late
    late = run_ranks(2, both_ways, tmp_path, timeout_s=300)[0]
    assert [each[:2] for each in late] == [each[:2] for each in cold]


def keep_first(limit: int):
    """Make a pass that closes over a number."""

    def own(gm, ctx):
        return 0 * limit

    return GraphPass(name="bucket", fn=own, stage="joint")


def test_identity_of_own_passes() -> None:
    one, same, other = (identity_of(keep_first(limit)) for limit in (1, 1, 2))
    assert one == same
    assert one.text != other.text  # what a closure holds is part of the pass
    assert one.is_complete


def test_a_pass_that_records_stays_the_same_pass() -> None:
    def recording(seen):
        def own(gm, ctx):
            seen.append(len(gm.graph.nodes))
            return 0

        return GraphPass(name="bucket", fn=own, stage="joint")

    seen: list[int] = [1]
    own = recording(seen)
    before = identity_of(own)
    seen += [2, 3]
    assert identity_of(own) == before
    assert not before.is_complete  # what it holds may decide what it does
    assert (
        identity_of(recording([1, 2, 3])).text != before.text
    )  # ranks that begin otherwise differ
    assert identity_of(recording([1])).text == before.text


def test_a_pass_without_identity_is_never_cached(tmp_path) -> None:
    class Own:
        calls = 0

        def __call__(self, gm, ctx):
            Own.calls += 1
            return 0

    def fn(rank):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
        for _ in range(2):
            torch._dynamo.reset()
            engine, _ = make_engine()
            own = GraphPass(name="own", fn=Own(), stage="joint")
            engine.compile(passes=[own, "zero3", "place"])
            train(engine, rank, 1)
        return Own.calls

    assert run_ranks(2, fn, timeout_s=300) == [2, 2]


def test_an_upgrade_of_what_shapes_graphs_has_another_key(tmp_path) -> None:
    """Graphs of an older torchloom are found by their key alone."""
    house = tmp_path / "torchloom"
    shutil.copytree(Path(torchloom.__file__).parent, house)

    def key() -> str:
        code = "from torchloom.pipeline import keys; print(keys.sources_digest())"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)

    before = key()
    edited = house / "passes" / "zero.py"
    edited.write_text(edited.read_text() + "\n\nEDITED = True\n")
    assert key() != before
