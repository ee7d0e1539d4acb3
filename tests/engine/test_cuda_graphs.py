"""Steps that are recorded and replayed equal those that are not. CPUs record by a stand-in."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch.fx.experimental.proxy_tensor import make_fx

import torchloom
from support.cuda_graphs import Seen, standing_in
from support.gpu import gpu, on_gpu_too, one_rank
from support.pool import run_ranks
from support.runs import sharded
from torchloom._torch.cuda_graphs import pool_of
from torchloom.capture import recorded
from torchloom.capture.recorded import RECORDED, RecordedGraph
from torchloom.errors import CompileError, ConfigError, PlanError
from torchloom.memory import distinct_bytes
from torchloom.ops import gather_start, reduce_start, wait_
from torchloom.ops.replays import watched
from torchloom.runtime.communicators import get_communicator
from torchloom.step.standing import Standing

NUM_STEPS = 6


class Model(nn.Module):
    """Dropout, a buffer that is written, a frozen and a tied parameter, equal layers, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12))
            for _ in range(4)
        )
        self.dropout = nn.Dropout(0.1)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        with torch.no_grad():
            self.seen.add_(x.mean((0, 1)))
        for block in self.blocks:
            x = x + block(x)
        x = self.dropout(self.frozen(x)) + self.seen.detach()
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten()), x


def ids_of(step: int, rank: int, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 31, (batch, 7), generator=generator)


def engine_of(model: nn.Module, stage: int, micro_steps: int = 1, **compiling: Any) -> Any:
    engine = sharded(
        model,
        stage,
        threshold=20,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
        gradient_accumulation_steps=micro_steps,
        gradient_clipping=1.0,
        compile={"strict": True, "backend": "aot_eager", **compiling},
    )
    engine.compile()
    return engine


def trained(rank: int, stage: int, micro_steps: int, device: str = "cpu", **compiling: Any) -> Any:
    """Return losses, hidden states, weights, and the counts of collectives of each step."""
    torch.manual_seed(0)
    engine = engine_of(Model(), stage, micro_steps, **compiling)
    torch.manual_seed(rank)
    found, kept = [], []
    for step in range(NUM_STEPS * micro_steps):
        loss, hidden = engine(ids_of(step, rank).to(device))
        kept.append(hidden)  # held: a replay must not write to it
        engine.backward(loss)
        engine.step()
        found.append((loss.detach().clone(), engine.comm_stats()))
    losses, stats = zip(*found, strict=True)
    weights = [torchloom.shard.local_shard(each).clone() for each in engine.module.parameters()]
    counted = [after.since(before) for before, after in itertools.pairwise(stats)]
    buffers = [each.clone() for each in engine.module.buffers()]
    states = [graph.cuda_graphs for graph in engine.compile_report().graphs]
    return [*losses, *[k.detach() for k in kept], *weights, *buffers], counted, states


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_replayed_steps_equal_those_that_run() -> None:
    """Stage 1 over two micro-steps, and stage 3, where only copies run beside a replay."""

    def run(rank: int) -> Any:
        seen: list[list[str]] = []
        replay = RecordedGraph._replay

        def watched(graph: Any, *args: Any, **kwargs: Any) -> Any:
            with Seen() as mode:
                found = replay(graph, *args, **kwargs)
            seen.append(mode.names)
            return found

        for stage, micro_steps in ((1, 2), (3, 1)):
            seen.clear()
            plain, counted, states = trained(rank, stage, micro_steps)
            assert not any(states)
            with standing_in() as tape, mock.patch.object(RecordedGraph, "_replay", watched):
                replayed, as_counted, (states,) = trained(
                    rank, stage, micro_steps, cuda_graphs=True
                )
            assert states == {"forward": RECORDED, "backward": RECORDED}
            assert same(plain, replayed)
            assert as_counted == counted
            later = 2 * (NUM_STEPS * micro_steps - 3)
            assert tape.log == ["warm-up"] * 4 + ["capture", "replay"] * 2 + ["replay"] * later
        return tape.noted, seen

    for (forward, backward), seen in run_ranks(2, run):
        assert "torchloom.gather_start.default" in forward
        assert "torchloom.reduce_start.default" in backward
        copies = {"aten.copy_.default", "aten.clone.default", "aten.detach.default"}
        assert {name for names in seen for name in names} <= copies
        assert seen[-2][0] == "aten.copy_.default"  # the batch
        assert seen[-2].count("aten.clone.default") == 2  # loss and hidden states
        # A gradient of each trained parameter; nothing of what forward saved.
        assert seen[-1].count("aten.clone.default") == 25


def test_inductor_code_is_recorded_also_from_its_cache() -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        plain, *_ = stepped(rank, engine_of(Layers(), 3, backend="inductor"))
        found = []
        for _ in range(2):
            with standing_in(by_calls=True) as tape:
                engine = engine_of(Layers(), 3, backend="inductor", cuda_graphs=True)
                replayed, states = stepped(rank, engine)
            found.append((same(plain, replayed), states, tape.log.count("replay")))
            torch.compiler.reset()
        return found

    for found in run_ranks(2, run):
        states = [{"forward": RECORDED, "backward": RECORDED}]
        assert found == [(True, states, 2 * (NUM_STEPS - 2))] * 2


class Layers(nn.Module):
    """Nothing random, nothing written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def rows_of(step: int, rank: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def stepped(rank: int, engine: Any, sizes: tuple[int, ...] = (3,) * NUM_STEPS) -> Any:
    losses = []
    for step, batch in enumerate(sizes):
        loss = engine(rows_of(step, rank, batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss)  # holds its backward graph
    weights = [torchloom.shard.local_shard(each).clone() for each in engine.module.parameters()]
    states = [graph.cuda_graphs for graph in engine.compile_report().graphs]
    return [*(each.detach() for each in losses), *weights], states


def test_new_sizes_are_recorded_or_told() -> None:
    """With `dynamic: false` each size has a graph; else the second compile is one for all sizes."""
    sizes = (3, 3, 3, 5, 5, 5, 5, 3)

    def run(rank: int) -> Any:
        found = []
        plain, _ = stepped(rank, engine_of(Layers(), 2), sizes)
        for kwargs in ({"kwargs": {"dynamic": False}}, {}):
            torch.compiler.reset()  # else sizes are known to vary
            with standing_in() as tape:
                engine = engine_of(Layers(), 2, cuda_graphs=True, **kwargs)
                replayed, states = stepped(rank, engine, sizes)
            found.append((same(plain, replayed), states, tape.log.count("replay")))
        return found

    for each, dynamic in run_ranks(2, run):
        recorded = {"forward": RECORDED, "backward": RECORDED}
        assert each == (True, [recorded] * 2, 2 * (1 + 2 + 1))
        why = "its sizes vary, or it draws the same random numbers twice"
        assert dynamic == (True, [recorded, {"forward": why, "backward": why}], 2)


def test_forwards_that_wait_for_their_backward_are_not_overwritten() -> None:
    """Two forwards before any backward, one that gets none, and one whose graph is kept for a second backward."""

    def run(rank: int) -> Any:
        def odd_steps(**compiling: Any) -> Any:
            engine = engine_of(Layers(), 3, **compiling)
            stepped(rank, engine, (3,) * 4)
            engine(rows_of(9, rank))
            engine.eval()
            with torch.no_grad():
                evaluated = [engine(rows_of(20 + step, rank)) for step in range(4)]
            engine.train()
            one, two = engine(rows_of(10, rank)), engine(rows_of(11, rank))
            engine.backward(one + 2 * two)
            engine.step()
            three = engine(rows_of(12, rank))
            engine.backward(three, retain_graph=True)
            engine(rows_of(13, rank))
            engine.backward(three)
            engine.step()
            after, states = stepped(rank, engine)
            return [*evaluated, one.detach(), two.detach(), three.detach(), *after], states

        with torch._functorch.config.patch(donated_buffer=False):  # else no graph can be kept
            plain, _ = odd_steps()
            with standing_in() as tape:
                replayed, states = odd_steps(cuda_graphs=True)
        return same(plain, replayed), states, tape.log[-2 * NUM_STEPS :]

    for is_same, states, last in run_ranks(2, run):
        assert is_same
        assert states == [{"forward": RECORDED, "backward": RECORDED}, {"inference": RECORDED}]
        assert last == ["replay"] * 2 * NUM_STEPS


def test_weights_that_moved_are_recorded_anew_and_forgotten_recordings_too() -> None:
    def run(rank: int) -> Any:
        def moved(**compiling: Any) -> Any:
            engine = engine_of(Layers(), 3, **compiling)
            stepped(rank, engine, (3,) * 4)
            with torch.no_grad():
                for each in engine.module.parameters():
                    each.data = torchloom.shard.local_shard(each).clone()
            after, _ = stepped(rank, engine)
            if compiling:
                engine._compiled.session.recordings.forget()
            again, states = stepped(rank, engine)
            return [*after, *again], states

        plain, _ = moved()
        with standing_in() as tape:
            replayed, states = moved(cuda_graphs=True)
        return same(plain, replayed), states, tape.log.count("capture"), tape.log.count("warm-up")

    for is_same, states, captured, warm in run_ranks(2, run):
        assert is_same
        assert states == [{"forward": RECORDED, "backward": RECORDED}]
        assert captured == 6
        assert warm == 8


def test_what_cannot_be_recorded_runs_and_is_told() -> None:
    """A value on another device, random numbers that backward draws again, collectives of gloo."""

    def run(rank: int) -> Any:
        plain, _ = stepped(rank, engine_of(Layers(), 3))
        with standing_in(carries_gloo=False) as tape:
            over_gloo, states = stepped(rank, engine_of(Layers(), 3, cuda_graphs=True))
        return same(plain, over_gloo), states, tape.log

    for is_same, states, log in run_ranks(2, run):
        assert is_same
        assert states == [dict.fromkeys(("forward", "backward"), OVER_GLOO)]
        assert log == ["warm-up"] * 2


OVER_GLOO = "gloo and shared memory carry its collectives, on the host"


def recorded_alone(fn: Any, *examples: Tensor) -> tuple[RecordedGraph, list[str]]:
    """Return a traced function to be recorded, and what it tells."""
    told: list[str] = []
    gm = make_fx(fn, tracing_mode="fake")(*examples)
    gm.graph.output_node().meta["desc"] = [PlainAOTOutput(0)]
    values = gm.graph.output_node().args[0]
    gm.graph.output_node().args = (values if isinstance(values, tuple) else (values,),)
    gm.recompile()
    graph = RecordedGraph("inference", gm, told.append)
    graph.of(lambda inputs: list(gm(*inputs)))
    return graph, told


def test_graphs_say_why_they_are_not_recorded() -> None:
    with standing_in():
        _, told = recorded_alone(
            lambda x: x + torch.zeros(3, device="meta"), torch.ones(3, device="meta")
        )
        assert told == ["x_1 is on meta"]
        _, told = recorded_alone(lambda x: x[x > 0], torch.ones(3))
        assert "cannot be recorded" in told[0]
        graph, told = recorded_alone(lambda x: x * 2, torch.ones(2, 3))
        for _ in range(3):
            (found,) = graph([torch.ones(1, 3).expand(2, 3)])
            assert torch.equal(found, torch.full((2, 3), 2.0))
        assert told == ["its input 0 has gaps, or elements that share memory"]


def test_a_written_input_is_copied_back_and_a_failing_recording_is_an_error() -> None:
    with standing_in() as tape:
        graph, told = recorded_alone(lambda x: x.add_(1) * 2, torch.ones(3))
        for _ in range(4):
            x = torch.ones(3)
            (found,) = graph([x])
            assert torch.equal(x, torch.full((3,), 2.0))
            assert torch.equal(found, torch.full((3,), 4.0))
        assert told == [RECORDED]
        graph, _ = recorded_alone(lambda x: x * 2, torch.ones(3))
        graph([torch.ones(3)]), graph([torch.ones(3)])
        with (
            mock.patch.object(
                tape, "record", side_effect=RuntimeError("operation not permitted\nmore")
            ),
            pytest.raises(CompileError, match=r"not permitted\): set compile.cuda_graphs to false"),
        ):
            graph([torch.ones(3)])


@pytest.mark.parametrize(
    ("compiling", "words"),
    [
        ({}, "needs a CUDA device, and this model computes on cpu"),
        ({"offload_activation": True}, "pass offload_activation gives it to others"),
        ({"offload_opt_states": True}, "pass offload_opt_states gives it to others"),
        ({"backend": "eager"}, "backend eager makes none"),
    ],
)
def test_refusals(compiling: dict[str, Any], words: str) -> None:
    on = standing_in() if compiling else contextlib.nullcontext()
    with one_rank("cpu"), on, pytest.raises(ConfigError, match=words):
        engine_of(Layers(), 3, cuda_graphs=True, **compiling)


@pytest.mark.parametrize(
    "kwargs", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]
)
def test_graphs_of_torch_stay_off(kwargs: dict[str, Any], caplog) -> None:
    with one_rank("cpu"):
        engine = engine_of(Layers(), 3, backend="inductor", kwargs=kwargs)
        engine(rows_of(0, 0))
    assert "compile.cuda_graphs records torchloom's" in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_budget_counts_what_recordings_keep(backend: str) -> None:
    """Saved values stay, results and gradients are copied, the batch has a buffer, states are updated beside it all."""
    with one_rank("cpu"):
        budget = {"memory_budget": "1GB", "replan_step": 0, "backend": backend}
        plain = engine_of(Layers(), 3, **budget)
        plain(rows_of(0, 0))
        with standing_in(by_calls=backend == "inductor"):
            engine = engine_of(Layers(), 3, cuda_graphs=True, **budget)
            for _ in range(4):
                engine.backward(engine(rows_of(0, 0)))
                engine.step()
        (one,), (other,) = plain._compiled.session.plans, engine._compiled.session.plans
        graphs = [each() for each in engine._compiled.session.recordings._graphs]
        held = [t for each in graphs if each._recording for t in (*each._held, *each._results)]
        held_bytes = distinct_bytes(held) - 4  # the loss's gradient lies in what is copied
        batch_bytes, gradient_bytes = 3 * 12 * 4, sum(4 * p.numel() for p in Layers().parameters())
        assert other.batch_bytes == 2 * one.batch_bytes == 2 * batch_bytes
        assert other.peak_bytes >= one.peak_bytes + gradient_bytes
        # What stays between steps is within the plan: saved values and results, gradients before they are copied.
        assert held_bytes - batch_bytes <= other.peak_bytes - gradient_bytes
        least = other.peak_bytes + other.batch_bytes + engine._compiled.standing.beside_graphs_bytes
        standing = Standing(budget_bytes=99, base_bytes=10, gradient_bytes=5, update_bytes=3)
        assert standing.beside_graphs_bytes == 10
        assert dataclasses.replace(standing, keeps_pool=True).beside_graphs_bytes == 13
        assert engine._compiled.standing.keeps_pool
        with standing_in(), pytest.raises(PlanError, match="infeasible"):
            tight = engine_of(Layers(), 3, cuda_graphs=True, memory_budget=str(least // 2))
            tight(rows_of(0, 0))


@gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [1, 3])
def test_on_a_device(stage: int, backend: str) -> None:
    with one_rank("cuda"):
        plain, counted, _ = trained(0, stage, 2, device="cuda", backend=backend)
        replayed, as_counted, (states,) = trained(
            0, stage, 2, device="cuda", backend=backend, cuda_graphs=True
        )
    assert states == {"forward": RECORDED, "backward": RECORDED}
    # Gradients of embeddings may be summed by atomics, in any order.
    for one, other in zip(plain, replayed, strict=True):
        assert (one - other).abs().mean() <= 1e-3 * one.abs().mean().clamp(min=1e-3)
    assert as_counted == counted


@on_gpu_too
def test_collectives_are_replayed_and_named_each_time(device: str) -> None:
    """One rank over NCCL, or over gloo by the stand-in."""
    with one_rank(device), contextlib.nullcontext() if device == "cuda" else standing_in():
        comm = get_communicator(dist.group.WORLD)
        place = torch.device(device, 0) if device == "cuda" else torch.device(device)
        pool, shard = pool_of(place), torch.arange(5.0, device=place)

        def run() -> tuple[Tensor, ...]:
            (full,) = gather_start([shard], ["w"], torch.float32, 1, comm.handle)
            wait_([full], [shard], comm.handle)
            (mean,) = reduce_start(
                [full * 2], ["w"], [5], torch.float32, torch.float32, comm.handle
            )
            wait_([mean], [full], comm.handle)
            return full, mean

        with torch.no_grad(), pool.turn():
            with pool.beside():
                run()
            recording = recorded.CudaRecording(pool)
            with watched() as work:
                full, mean = recording.record(run)
            assert not work.refusals
            for value in (1.0, 7.0):
                shard.fill_(value)
                before, begun = comm.stats(), comm.shard.channel.num_begun
                for act in work.acts:
                    act()
                recording.replay()
                assert torch.equal(full, shard)
                assert torch.equal(mean, 2 * shard)
                assert comm.stats().since(before).num_collectives == 2
                assert comm.shard.channel.num_begun == begun + 2
