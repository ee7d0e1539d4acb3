"""The two routes from a captured graph to code: kinds, boxed runs, other backends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import fx

from support.pool import run_ranks
from support.runs import make_engine, train
from torchloom._torch.inductor import empty_files_removed
from torchloom.capture.routes import run_boxed
from torchloom.errors import CompileError


def test_boxed_runs_free_inputs_after_their_last_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    alive = []
    z = graph.call_function(lambda value: alive.append(gone() is None) or value + 1, (y,))
    graph.output((z,))
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    run = run_boxed(fx.GraphModule({}, graph))
    args = [tensor]
    del tensor
    (result,) = run(args)
    gc.collect()
    assert args == []
    assert alive == [True]
    assert torch.equal(result, torch.full((3,), 2.0))


def test_an_empty_file_of_a_killed_compile_is_removed_and_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    lock = tmp_path / "locks" / "cabc.lock"
    empty, whole = tmp_path / "ab" / "cabc.main.so", tmp_path / "ab" / "cabc.py"
    for path, text in ((lock, ""), (empty, ""), (whole, "def call(args): ...")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(CompileError, match="was empty") as error, empty_files_removed():
        raise ImportError(f"{empty}: file too short")
    assert str(empty) in str(error.value)
    assert (lock.exists(), empty.exists(), whole.exists()) == (True, False, True)
    with pytest.raises(ImportError, match="too short"), empty_files_removed():
        raise ImportError(f"{whole}: file too short")


def test_a_callable_backend_gets_woven_graphs() -> None:
    def fn(rank):
        seen = []

        def backend(gm, example_inputs):
            seen.append({str(n.target) for n in gm.graph.nodes})
            return gm.forward

        engine, _ = make_engine()
        engine.compile(backend=backend)
        losses = train(engine, rank, 2)
        plain, _ = make_engine()
        return (
            losses,
            train(plain, rank, 2),
            any("torchloom.gather_start.default" in s for s in seen),
        )

    for losses, expected, woven in run_ranks(2, fn):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert woven
