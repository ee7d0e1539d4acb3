"""Weights in shared memory: read in place, held once, and right whoever writes them, and when."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchloom
from support import ranks
from support.models import tokens
from support.pool import run_ranks
from support.runs import make_engine, settings, train
from support.shm import mapped_bytes, proportional_bytes
from torchloom.errors import ShardError
from torchloom.memory import measure_peak
from torchloom.runtime.transports.shm import arena
from torchloom.shard import gathered, layout_of, local_shard

SHARED = {"symmetric_memory": True, "strict": True}
PLAIN = {"strict": True}


def compiled(
    options: dict[str, Any], backend: str = "aot_eager", stage: int = 3, **rest: Any
) -> Any:
    engine, model = make_engine(stage, compile=options, **rest)
    engine.compile(backend=backend)
    return engine, model


def calls(engine) -> dict[str, int]:
    found: dict[str, int] = {}
    for graph in engine.compile_report().graphs:
        for name, count in graph.collectives.items():
            found[name] = found.get(name, 0) + count
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_gather_is_left_and_the_bytes_are_counted(backend: str) -> None:
    def fn(rank):
        counts = []
        for options in (PLAIN, SHARED):
            engine, _ = compiled(options, backend)
            train(engine, rank, 2)
            before = engine.comm_stats()
            train(engine, rank, 1, first=2)
            after = engine.comm_stats()
            counts.append((calls(engine), after.num_bytes - before.num_bytes))
        return counts

    (plain, plain_bytes), (shared, shared_bytes) = run_ranks(2, fn)[0]
    assert plain["forward torchloom.gather_start"] > 0
    for kind in ("forward", "backward"):
        assert shared[f"{kind} torchloom.symmetric_start"] == 1
        assert shared[f"{kind} torchloom.symmetric_done_"] == 1
        assert f"{kind} torchloom.gather_start" not in shared
    assert shared_bytes == plain_bytes


@pytest.mark.parametrize(
    "backend, precision", [("aot_eager", {}), ("inductor", {"bf16": {"enabled": True}})]
)
def test_the_plan_knows_that_weights_take_no_room(backend: str, precision) -> None:
    budget = {"memory_budget": "1GB", "replan_step": 0}

    def fn(rank):
        plain, _ = compiled({**PLAIN, **budget}, backend, **precision)
        engine, _ = compiled({**SHARED, **budget}, backend, **precision)
        train(engine, rank, 2)
        x, kept = tokens(2, rank), []

        def micro():
            kept.append(engine(x))
            engine.backward(kept[0])

        measured = measure_peak(micro).peak_bytes
        (graph,) = engine.plan().graphs
        own = sum(spec.shard_numel for spec in layout_of(engine.module).sharded)
        more = engine.plan().base_bytes - plain.plan().base_bytes
        return measured, graph.peak_bytes, more, own

    for measured, predicted, more, own in run_ranks(2, fn):
        # The loss and its gradient are not the graphs'.
        assert predicted <= measured <= predicted + 16
        assert more == (2 * own if precision else 0)  # the slice in 16 bits that the others read


def test_one_host_holds_each_weight_once() -> None:
    def fn(rank):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1023))
        config = settings(3, compile=SHARED, zero_optimization={"stage": 3})
        engine, *_ = torchloom.initialize(model=model, config=config)
        before = (mapped_bytes(), proportional_bytes())
        engine.compile(backend="aot_eager")
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 1024)).square().mean())
            engine.step()
        numel = sum(spec.numel for spec in layout_of(model).sharded)
        return mapped_bytes() - before[0], proportional_bytes() - before[1], 4 * numel

    results = run_ranks(3, fn)
    whole = results[0][2]
    for mapped, _, _ in results:
        assert whole <= mapped < 1.01 * whole
    assert whole <= sum(held for _, held, _ in results) < 1.02 * whole


def sometimes_late(rank: int, turn: int) -> None:
    """Let another rank lag behind at every turn, by longer than a step takes."""
    if turn % 2 == rank:
        time.sleep(0.05)


def scale(model, rank, engine) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def scale_data(model, rank, engine) -> None:
    for param in model.parameters():
        param.data.mul_(1.1)


def surgery(model, rank, engine) -> None:
    with gathered(model, modifier_rank=1):
        for param in model.parameters():
            with torch.no_grad():
                param.add_(0.01 * (rank + 1))


def reload(model, rank, engine) -> None:
    halves = {k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(halves)


def swap(model, rank, engine) -> float:
    """Other data for an evaluation, and back."""
    own = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = param.data * 0.25
    with torch.no_grad():
        evaluated = engine(tokens(7, rank)).item()
    for param, data in zip(model.parameters(), own, strict=True):
        param.data = data
    return evaluated


@pytest.mark.parametrize("write", [scale, scale_data, surgery, reload, swap])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_whoever_writes_all_ranks_read_it(write, precision) -> None:
    def fn(rank):
        runs = []
        for options in (PLAIN, SHARED):
            engine, model = compiled(options, **precision)
            seen = []
            for turn in range(6):
                sometimes_late(rank, turn)
                if turn % 3 == 0:
                    with torch.no_grad():  # reads, then writes, with nothing in between
                        seen.append(engine(tokens(100 + turn, rank)).item())
                sometimes_late(rank, turn + 1)
                seen.append(write(model, rank, engine))
                sometimes_late(rank, turn)
                seen += train(engine, rank, 1, first=turn)
            runs.append((seen, model.state_dict()))
        (plain, want), (shared, got) = runs
        return plain == shared, all(torch.equal(want[key], got[key]) for key in want)

    assert run_ranks(2, fn) == [(True, True)] * 2


def test_checkpoints_go_in_and_out(tmp_path) -> None:
    def fn(rank):
        engine, model = compiled(SHARED)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        want = train(engine, rank, 3, first=2)
        engine.load_checkpoint(tmp_path)
        again = train(engine, rank, 3, first=2)
        plain, other = compiled(PLAIN)
        plain.load_checkpoint(tmp_path)
        return want == again == train(plain, rank, 3, first=2), bool(other is not model)

    assert run_ranks(2, fn) == [(True, True)] * 2


class Leaky(nn.Module):
    """Weights that leave the graph, are updated out of place, or are only read."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Linear(8, 9, bias=False)
        self.patched = nn.Linear(9, 7, bias=False)
        self.read = nn.Linear(7, 5, bias=False)

    def forward(self, x):
        weight = self.patched.weight.index_put((torch.tensor([0, 2]),), torch.tensor(0.5))
        y = F.linear(self.given(x).tanh(), weight)
        return self.read(y).square().mean(), self.given.weight.T


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_weights_that_leave_or_are_patched_are_copies(backend: str) -> None:
    def fn(rank):
        runs = []
        for options in (PLAIN, SHARED):
            torch.manual_seed(0)
            engine, *_ = torchloom.initialize(model=Leaky(), config=settings(3, compile=options))
            engine.compile(backend=backend)
            seen = []
            for turn in range(3):
                loss, weight = engine(torch.full((4, 8), 0.1 * (turn + rank + 1)))
                before = weight.detach().clone()
                engine.backward(loss)
                engine.step()
                seen += [loss.item(), torch.equal(before, weight), weight.sum().item()]
                weight.detach().zero_()  # it is the caller's
            runs.append(seen)
            found = calls(engine)
        return runs[0] == runs[1], all(runs[1][1::3]), found

    for same, unchanged, found in run_ranks(2, fn):
        assert same
        assert unchanged
        assert found["forward torchloom.symmetric_start"] == 1
        assert found["forward torchloom.gather_start"] >= 1


def test_copies_and_files_hold_a_piece_not_the_arena() -> None:
    def fn(rank):
        engine, model = compiled(SHARED)
        train(engine, rank, 1)
        piece = local_shard(model._modules["up"]._parameters["weight"])
        buffer = io.BytesIO()
        torch.save(piece, buffer)
        twin = copy.deepcopy(piece)
        with torch.no_grad():
            twin.zero_()
        return piece.untyped_storage().nbytes(), buffer.tell() < 3_000, piece.abs().sum().item() > 0

    assert run_ranks(2, fn) == [(17 * 12 // 2 * 4, True, True)] * 2


def test_a_destroyed_engine_leaves_a_model_that_works_and_no_memory() -> None:
    def fn(rank):
        engine, model = compiled(SHARED)
        train(engine, rank, 2)
        with torch.no_grad():
            before = engine(tokens(3, rank)).item()
        base = mapped_bytes()
        engine.destroy()
        eager = model(tokens(3, rank)).item()
        whole = engine.unshard()
        del engine
        return (
            abs(before - eager) < 1e-5,
            whole(tokens(3, rank)).item() == eager,
            base,
            mapped_bytes(),
        )

    for close, same, before, after in run_ranks(2, fn):
        assert close
        assert same
        assert after < before


def test_too_little_memory_for_the_weights_is_said_and_they_are_copied(caplog) -> None:
    def fn(rank):
        engine, _ = make_engine(3, compile=SHARED)
        arena.free_bytes = lambda: 0
        engine.compile(backend="aot_eager")
        losses = train(engine, rank, 2)
        other = compiled(PLAIN)[0]
        return losses == train(other, rank, 2), calls(engine), caplog.text

    for same, found, _ in ranks.run_ranks(2, fn):
        assert same
        assert found["forward torchloom.gather_start"] > 0
        assert "forward torchloom.symmetric_start" not in found
    assert "gathered by copying" in ranks.run_ranks(2, fn)[0][2]


def test_code_that_outlives_its_group_says_so() -> None:
    def fn(rank):
        engine, _ = compiled(SHARED)
        train(engine, rank, 1)
        torch.distributed.destroy_process_group()
        with pytest.raises(ShardError, match="has been destroyed"):
            engine(tokens(1, rank))
        return True

    assert run_ranks(2, fn) == [True, True]
