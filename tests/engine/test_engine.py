"""The engine's calls: accumulation, precision, optimizers, schedules, fallbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import hears, make_engine, settings, train
from torchloom.errors import EngineError, PassError
from torchloom.graph import GraphPass


def test_accumulation_boundaries() -> None:
    def fn(rank):
        engine, _ = make_engine(gradient_accumulation_steps=3)
        seen = []
        for micro in range(6):
            seen.append(engine.is_gradient_accumulation_boundary())
            engine.backward(engine(tokens(micro, rank)))
            engine.step()
        return seen, engine.global_steps, engine.global_samples, engine.train_batch_size()

    assert run_ranks(2, fn)[0] == ([False, False, True] * 2, 2, 36, 18)


def test_no_sync_adds_up_locally() -> None:
    def fn(rank):
        engine, _model = make_engine(0)
        with engine.no_sync():
            engine.backward(engine(tokens(0, rank)))
            with pytest.raises(EngineError, match=r"inside no_sync\(\) .*: leave the block"):
                engine.step()
        before = engine.comm_stats().num_collectives
        engine.backward(engine(tokens(1, rank)))
        engine.step()
        return engine.global_steps, before

    assert run_ranks(2, fn)[0] == (1, 0)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_stage1_communicates_once_per_step(accumulation: int) -> None:
    def fn(rank):
        engine, _ = make_engine(1, gradient_accumulation_steps=accumulation)
        train(engine, rank, 1)
        return engine.comm_stats().num_collectives

    # Sliced gradients, small whole gradients, then the stepped slices; small numbers are not counted.
    assert run_ranks(2, fn)[0] == 3


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_volume_of_stage3(backend: str | None) -> None:
    def fn(rank):
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        engine, *_ = torchloom.initialize(model=model, config=settings())
        if backend:
            engine.compile(backend=backend)
        engine.backward(engine(torch.ones(2, 16, requires_grad=True)).sum())
        return engine.comm_stats().num_bytes

    # Two gathers and one reduction of each weight, no more.
    assert run_ranks(2, fn)[0] == 3 * 2 * 16 * 16 * 4


def test_eager_stage3_saves_no_weight() -> None:
    class Probe(nn.Module):
        """Counts the bytes of weights that autograd keeps between forward and backward."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])

        def forward(self, x):
            return self.layers(x).square().sum()

    def fn(rank, stage):
        import gc

        model = Probe()
        engine, *_ = torchloom.initialize(model=model, config=settings(stage))
        loss = engine(torch.randn(2, 64))
        gc.collect()
        kept = [
            o for o in gc.get_objects()
            if type(o) is torch.Tensor and o.untyped_storage().nbytes() == 64 * 64 * 4
        ]  # fmt: skip
        engine.backward(loss)
        return len(kept)

    assert run_ranks(2, fn, 3)[0] == 0


def test_gradient_norm_is_that_of_the_whole_model() -> None:
    def fn(rank):
        engine, _model = make_engine(gradient_clipping=1e9)
        peer = nn.parallel.DistributedDataParallel(tricky())
        peer(tokens(0, rank)).backward()
        expected = torch.nn.utils.clip_grad_norm_(peer.parameters(), 1e9)
        train(engine, rank, 1)
        return engine.get_global_grad_norm(), float(expected)

    for ours, theirs in run_ranks(2, fn):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_close_to_fp32(stage: int) -> None:
    def fn(rank, dtype):
        engine, model = make_engine(stage, **({"bf16": {"enabled": True}} if dtype else {}))
        losses = train(engine, rank, 20)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        return losses

    exact, rounded = run_ranks(2, fn, False)[0], run_ranks(2, fn, True)[0]
    # bf16 has 8 bits of mantissa: a relative step of 2^-8 per rounding, a few per loss.
    assert rounded == pytest.approx(exact, rel=0.03)
    assert rounded != exact


def groups_of(model: nn.Module, how: str) -> list[Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if how == "factory":
        return trained
    large, small = ([p for p in trained if (p.dim() > 1) is each] for each in (True, False))
    return [{"params": large, "weight_decay": 0.1}, {"params": small}]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_users_optimizer_object_and_factory(stage: int) -> None:
    def fn(rank):
        found = []
        for how in ("object", "factory"):
            model, peer = tricky(), tricky()
            given = sgd(groups_of(model, how)) if how == "object" else sgd
            config = settings(stage)
            del config["optimizer"]
            engine, returned, *_ = torchloom.initialize(model=model, optimizer=given, config=config)
            train(engine, rank, 3)
            assert returned is engine.optimizer
            assert how == "factory" or returned is given
            ddp, optimizer = nn.parallel.DistributedDataParallel(peer), sgd(groups_of(peer, how))
            for step in range(3):
                ddp(tokens(10 * step, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found += [
                float(sum(value.double().sum() for value in each.state_dict().values()))
                for each in (model, peer)
            ]
        return found

    first, second = run_ranks(2, fn)
    assert first[::2] == second[::2]
    assert first[::2] == pytest.approx(first[1::2], rel=1e-6)


def test_a_compile_that_cannot_start_leaves_the_engine_as_it_was(monkeypatch) -> None:
    def fn(rank):
        plain, _ = make_engine(3, seed=1)
        expected = train(plain, rank, 2)
        engine, _ = make_engine(3, seed=1)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no compiler"):
            patch.setattr("torchloom.step.compiled.compile_in_place", no_compiler)
            engine.compile(backend="aot_eager")
        uncompiled = engine.is_compiled, train(engine, rank, 2) == expected
        engine.compile(backend="aot_eager")
        train(engine, rank, 1)
        return uncompiled, engine.is_compiled

    assert run_ranks(2, fn) == [((False, True), True)] * 2


def no_compiler(*args, **kwargs):
    raise RuntimeError("no compiler here")


def test_a_config_can_ask_the_engine_to_compile_itself() -> None:
    def fn(rank):
        engine, _ = make_engine(3, compile={"enabled": True, "backend": "aot_eager"})
        before = engine.is_compiled
        engine.compile()  # asked for twice, done once
        with pytest.raises(EngineError, match=r"drop compile\.enabled"):
            engine.compile(backend="inductor")
        train(engine, rank, 1)
        return before, len(engine.compile_report().graphs)

    assert run_ranks(2, fn) == [(True, 1)] * 2


def broken(gm, ctx):
    """Leave a node that reads a value before it is made."""
    first, *_, last = (n for n in gm.graph.nodes if n.op == "call_function")
    first.args = (last, *first.args[1:])
    return 1


BROKEN = GraphPass(name="broken", fn=broken, stage="joint")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_broken_pass_falls_back_and_says_so_once(backend: str, caplog) -> None:
    def fn(rank):
        heard = hears()
        engine, _ = make_engine()
        engine.compile(backend=backend, passes=[BROKEN, "zero3", "place"])
        losses = train(engine, rank, 3)
        plain, _ = make_engine()
        said = [text for text in heard if "weaving failed" in text]
        return losses, train(plain, rank, 3), said, engine.compile_report().fallbacks

    results = run_ranks(2, fn)
    assert [len(said) for _, _, said, _ in results] == [1, 0]  # rank 0 speaks for the run
    assert "broken" in results[0][2][0]
    for losses, expected, _, fallbacks in results:
        assert losses == pytest.approx(expected, rel=1e-6)
        assert "'broken' broke graph 'graph0.joint'" in fallbacks[0]
        assert "--- before" in fallbacks[0]


def test_a_broken_pass_is_an_error_when_strict() -> None:
    def fn(rank):
        engine, _ = make_engine(compile={"deepcompile": True, "strict": True})
        engine.compile(backend="aot_eager", passes=[BROKEN, "zero3", "place"])
        try:
            train(engine, rank, 1)
        except Exception as error:  # noqa: BLE001  Dynamo may wrap it
            return isinstance(error, PassError) or "PassError" in repr(error), str(error)
        return False, ""

    for is_pass_error, text in run_ranks(2, fn):
        assert is_pass_error, text
        assert "broken" in text


def test_dump_graphs(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(
            compile={"deepcompile": True, "strict": True, "dump_graphs": str(tmp_path)}
        )
        engine.compile(backend="aot_eager")
        train(engine, rank, 1)

    run_ranks(2, fn)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "graph0.joint.00.captured.txt" in names
    assert "graph0.forward.02.place.txt" in names
    assert "gather_start" in (tmp_path / "graph0.forward.02.place.txt").read_text()
