"""The two routes from a captured graph to code: kinds, boxed runs, other backends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import fx

from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import make_engine, train
from torchloom._torch.inductor import empty_files_removed
from torchloom.capture.hooks import GraphHook, kind_of
from torchloom.capture.routes import run_boxed
from torchloom.errors import CompileError


def graph_with_inputs(*names: str) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in names]
    graph.output(tuple(nodes))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("primals_1", "primals_2"), "forward"),
        (("primals_1", "tangents_1"), "backward"),
        (("arg0_1",), "inference"),
    ],
)
def test_kind_of_a_lowered_graph(names: tuple[str, ...], kind: str) -> None:
    assert kind_of(graph_with_inputs(*names)) == kind


def test_hook_key_is_its_uuid_and_survives_pickling() -> None:
    hook = GraphHook(lambda gm: None, "key")
    assert hook.uuid() == "key"
    assert hook.__getstate__()["_key"] == "key"


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


def test_evaluation_and_other_shapes_recompile_correctly() -> None:
    def fn(rank):
        engine, _ = make_engine()
        engine.compile(backend="aot_eager")
        train(engine, rank, 1)
        with torch.no_grad():
            small = engine.eval()(tokens(3, rank, batch=2, length=5)).item()
        engine.train()
        train(engine, rank, 1, first=1)
        plain, _ = make_engine()
        train(plain, rank, 1)
        with torch.no_grad():
            expected = plain(tokens(3, rank, batch=2, length=5)).item()
        return small, expected

    for small, expected in run_ranks(2, fn):
        assert small == pytest.approx(expected, rel=1e-6)


def test_the_plain_model_is_the_reference() -> None:
    def fn(rank):
        engine, _ = make_engine()
        return engine(tokens(0, rank)).item()

    assert run_ranks(2, fn)[0] == tricky()(tokens(0, 0)).item()
