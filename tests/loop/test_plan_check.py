"""A plan's peak and time stand beside the measured ones, once."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import torchloom
from support.gpu import gpu, one_rank
from support.pool import run_ranks
from support.runs import ADAMW, hears, sharded
from torchloom.events import PlanCompared, Recorder, StepEnded
from torchloom.loop.plan_check import TIMED_STEPS, requested_peak_bytes
from torchloom.memory import measure_peak

NUM_STEPS = 9


class Wide(nn.Module):
    """Keeps large activations for backward, of which a budget can drop some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x).sin()).exp().sin()
        return x.square().mean()


def engine_of(stage: int, *, accumulation: int = 1, **compiling):
    torch.manual_seed(3)
    engine = sharded(
        Wide(),
        stage,
        batch=2,
        threshold=20,
        optimizer=ADAMW,
        gradient_accumulation_steps=accumulation,
        compile={"backend": "aot_eager", "memory_budget": "1GB", **compiling},
    )
    engine.compile()
    return engine


def train(engine, rank: int, num_steps: int = NUM_STEPS, batch: int = 512) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_steps * engine.gradient_accumulation_steps()):
        x = torch.randn(batch, 64, generator=generator)
        engine.backward(engine(x.to(engine.device)))
        engine.step()


def heard(recorder: Recorder, kind):
    return [event for event in recorder.events if isinstance(event, kind)]


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (3, 1), (3, 2)])
def test_predicted_and_measured_are_compared_once(stage: int, accumulation: int) -> None:
    def fn(rank):
        engine = engine_of(stage, accumulation=accumulation)
        logging.getLogger("torchloom.loop.plan_check").setLevel(logging.INFO)
        told = hears("torchloom.loop.plan_check", logging.INFO)
        with Recorder() as recorder:
            train(engine, rank)
        return (
            heard(recorder, PlanCompared),
            heard(recorder, StepEnded),
            told,
            engine.plan().peak_bytes,
            sum(graph.step_us for graph in engine.plan().graphs) * accumulation / 1e6,
        )

    for compared, steps, told, peak_bytes, seconds in run_ranks(2, fn):
        (one,) = compared
        assert one.predicted_peak_bytes == peak_bytes > 2 << 20
        assert one.measured_peak_bytes == pytest.approx(peak_bytes, rel=0.02)
        assert one.predicted_seconds == pytest.approx(seconds) and seconds > 0
        timed = steps[one.step - 1 - TIMED_STEPS : one.step - 1]
        assert 0 < one.measured_seconds < min(each.seconds for each in timed)
        assert {each.predicted_peak_bytes for each in steps} == {peak_bytes}
        measured = [each.measured_peak_bytes for each in steps]
        assert measured == [one.measured_peak_bytes if s.step >= one.step else None for s in steps]
        assert steps[0].metrics()["predicted_seconds"] == pytest.approx(seconds)
        (text,) = told
        assert f"predicted {peak_bytes / 2**20:.1f} MiB, measured" in text


@gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_peak_of_a_plan_is_what_is_requested_of_the_allocator(backend: str) -> None:
    """Besides cuBLAS' workspaces, of up to 33 MB each, which belong to no tensor."""
    torch.cuda.empty_cache()
    with one_rank("cuda"), Recorder() as recorder:
        engine = engine_of(3, memory_budget="20GB", backend=backend)
        train(engine, 0, batch=1 << 19)
    (one,) = heard(recorder, PlanCompared)
    assert one.predicted_peak_bytes > 1 << 30
    off = one.measured_peak_bytes - one.predicted_peak_bytes
    assert abs(off) <= 0.005 * one.predicted_peak_bytes + (66 << 20)


def test_a_device_tells_what_was_requested_or_else_what_it_allocated(monkeypatch) -> None:
    stats = {"requested_bytes.all.peak": 1000}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1024)
    device = torch.device("cuda", 0)
    assert requested_peak_bytes(device) == 1000
    stats.clear()  # the backend "cudaMallocAsync" counts no requests
    assert requested_peak_bytes(device) == 1024


def loop_of(stage: int, accumulation: int):
    """Return a function that makes so many steps in a loop without an engine, and its session."""
    torch.manual_seed(3)
    model = torchloom.shard_model(Wide(), stage=stage, persistence_threshold=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "gradient_accumulation_steps": accumulation,
        "compile": {"memory_budget": "1GB", "replan_step": 0},
    }
    session = torchloom.compile(model, config=config, optimizer=optimizer, backend="aot_eager")

    def train(rank: int, num_steps: int, between=lambda: None) -> None:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(num_steps):
            for micro_step in range(accumulation):
                is_last = micro_step == accumulation - 1
                with nullcontext() if is_last else torchloom.no_sync(model):
                    model(torch.randn(512, 64, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
            between()

    return model, session, train


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 1), (3, 1), (3, 2)])
def test_a_loop_without_an_engine_measures_its_peak(stage: int, accumulation: int) -> None:
    def fn(rank):
        _, session, train = loop_of(stage, accumulation)
        with Recorder() as recorder:
            train(rank, 6)
        return heard(recorder, PlanCompared), heard(recorder, StepEnded), session.plan().peak_bytes

    for (one,), steps, peak_bytes in run_ranks(2, fn):
        assert one.predicted_peak_bytes == peak_bytes > 2 << 20
        assert one.measured_peak_bytes == pytest.approx(peak_bytes, rel=0.02)
        assert one.measured_seconds is None
        measured = [each.measured_peak_bytes for each in steps]
        assert measured == [one.measured_peak_bytes if s.step >= one.step else None for s in steps]


def test_evaluations_and_profilers_of_a_loop_are_left_alone() -> None:
    def fn(rank):
        model, _, train = loop_of(3, 1)
        batch = torch.randn(512, 64)

        def evaluate(grad: bool) -> None:
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    model(batch)
            assert not torch.autograd._profiler_enabled()

        with Recorder() as recorder:
            train(rank, 1)
            traced = measure_peak(lambda: train(rank, 6)).peak_bytes
            during = len(heard(recorder, PlanCompared))
            evaluate(True)  # nobody knows yet that no step follows
            train(rank, 6, lambda: evaluate(False))
        return during, len(heard(recorder, PlanCompared)), traced

    ((during, after, peak),) = run_ranks(1, fn)
    assert (during, after) == (0, 1) and peak > 1 << 20


def test_a_profiler_within_a_measured_step_keeps_its_events() -> None:
    def fn(rank):
        model, _, train = loop_of(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        num_events = []
        with Recorder() as recorder:
            train(rank, 3)
            for _ in range(3):
                loss = model(torch.randn(512, 64))
                with torch.profiler.profile() as profile:
                    loss.backward()
                num_events.append(len(profile.events()))
                optimizer.step()
                optimizer.zero_grad()
        return num_events, heard(recorder, PlanCompared), heard(recorder, StepEnded)

    ((num_events, compared, steps),) = run_ranks(1, fn)
    assert min(num_events) > 10 and compared == []
    assert {each.measured_peak_bytes for each in steps} == {None}


def test_a_process_may_end_within_a_measured_step(tmp_path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import torch, torchloom\n"
        "model = torchloom.shard_model(torch.nn.Linear(64, 64), stage=3, persistence_threshold=0)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "config = {'memory_budget': '1GB', 'replan_step': 0}\n"
        "torchloom.compile(model, config=config, optimizer=optimizer, backend='aot_eager',\n"
        "                  log_to=lambda metrics, step: None)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(8, 64)).mean().backward()\n"
        "    optimizer.step()\n"
        "model(torch.ones(8, 64))\n"
        "assert torch.autograd._profiler_enabled()\n"
    )
    ended = subprocess.run([sys.executable, str(script)], timeout=300, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()


def test_on_a_cpu_nothing_is_profiled_for_nobody() -> None:
    def fn(rank):
        engine = engine_of(3, replan_step=0)
        train(engine, rank, 1)  # measures operators for the plan
        made = []
        before = torch.profiler.profile.start

        def start(self):
            made.append(1)
            before(self)

        torch.profiler.profile.start = start
        try:
            train(engine, rank)
            quiet = len(made)
            with Recorder():
                train(engine, rank)
        finally:
            torch.profiler.profile.start = before
        return quiet, len(made)

    assert run_ranks(1, fn) == [(0, 3)]  # forward, backward and step of one step


def test_another_size_has_a_prediction_without_a_time() -> None:
    def fn(rank):
        engine = engine_of(3)
        with Recorder() as recorder:
            train(engine, rank, 2)
            train(engine, rank, 2, batch=256)
            train(engine, rank, 2)
        return heard(recorder, StepEnded)

    for steps in run_ranks(2, fn):
        assert steps[1].predicted_seconds is not None and steps[1].recompiles == 0
        assert steps[2].recompiles > 0
        # Which of two graphs a step runs is not known before it.
        assert steps[-1].predicted_seconds is None and steps[-1].predicted_peak_bytes > 0


def test_a_watch_records_the_numbers_and_the_comparison() -> None:
    def fn(rank):
        engine = engine_of(3, replan_step=0)
        with torchloom.watch() as watched:
            train(engine, rank)
        rows = watched.record.events
        steps = [row.data for row in rows if row.kind == "StepEnded"]
        (compared,) = [row.data for row in rows if row.kind == "PlanCompared"]
        return steps, compared, watched.summary()

    ((steps, compared, told),) = run_ranks(1, fn)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step["loss"] > 0 for step in steps)
    assert compared["measured_peak_bytes"] > 1 << 20
    assert f"the plan after step {compared['step']}: peak " in told
