"""The engine's calls: accumulation, precision, optimizers, schedules, fallbacks."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import make_engine, settings, train
from torchloom.errors import EngineError, PassError
from torchloom.graph import GraphPass
from torchloom.shard import local_shard


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


def test_boundary_set_by_hand() -> None:
    def fn(rank):
        engine, _ = make_engine(gradient_accumulation_steps=3)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(tokens(0, rank)))
        engine.step()
        return engine.global_steps, engine.was_step_applied()

    assert run_ranks(2, fn)[0] == (1, True)


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


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_skips_a_step_that_overflows(stage: int) -> None:
    def fn(rank):
        engine, model = make_engine(
            stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        )
        train(engine, rank, 2)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        loss = engine(tokens(9, rank))
        # One rank alone overflows; both must skip.
        engine.backward(loss * (float("inf") if rank == 1 else 1.0))
        engine.step()
        same = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        applied = engine.was_step_applied()
        train(engine, rank, 1)
        return same, applied, engine.skipped_steps, engine.loss_scale, engine.was_step_applied()

    for result in run_ranks(2, fn):
        assert result == (True, False, 1, 2.0**7, True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_users_optimizer_object_and_factory(stage: int) -> None:
    def fn(rank, how):
        model = tricky()
        if how == "object":
            decay = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
            rest = [p for p in model.parameters() if p.dim() <= 1]
            optimizer = torch.optim.SGD(
                [{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.1, momentum=0.9
            )
        else:
            optimizer = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
        config = settings(stage)
        del config["optimizer"]
        engine, returned, *_ = torchloom.initialize(model=model, optimizer=optimizer, config=config)
        train(engine, rank, 3)
        assert returned is engine.optimizer
        assert how == "factory" or returned is optimizer
        return float(sum(v.double().sum() for v in model.state_dict().values()))

    def reference(rank, how):
        model = tricky()
        peer = nn.parallel.DistributedDataParallel(model)
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        if how == "object":
            groups = [
                {"params": [p for p in model.parameters() if p.dim() > 1 and p.requires_grad], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() <= 1]},
            ]  # fmt: skip
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        for step in range(3):
            peer(tokens(10 * step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(sum(v.double().sum() for v in model.state_dict().values()))

    for how in ("object", "factory"):
        ours, theirs = run_ranks(2, fn, how), run_ranks(2, reference, how)
        assert ours[0] == ours[1]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)


def test_training_data_is_divided() -> None:
    def fn(rank):
        data = torch.utils.data.TensorDataset(torch.arange(24))
        _, _, loader, _ = torchloom.initialize(
            model=tricky(), training_data=data, config=settings()
        )
        return torch.cat([batch for (batch,) in loader]).tolist()

    first, second = run_ranks(2, fn)
    assert sorted(first + second) == list(range(24))


def test_hybrid_sharding_equals_full_sharding() -> None:
    def fn(rank, shard_size):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 20, "shard_size": shard_size}
        engine, model = make_engine(zero_optimization=zero)
        losses = train(engine, rank, 5)
        held = sum(local_shard(p).numel() for p in model.parameters())
        return losses, held, float(sum(v.double().sum() for v in model.state_dict().values()))

    full, hybrid = run_ranks(4, fn, 4), run_ranks(4, fn, 2)
    assert len({result[2] for result in hybrid}) == 1
    for a, b in zip(full, hybrid, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-6)
        assert a[1] < b[1]


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
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("torchloom").addHandler(handler)
        engine, _ = make_engine()
        engine.compile(backend=backend, passes=[BROKEN, "zero3", "place"])
        losses = train(engine, rank, 3)
        plain, _ = make_engine()
        said = [text for text in records if "weaving failed" in text]
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
