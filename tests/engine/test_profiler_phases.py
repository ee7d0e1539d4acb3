"""Phases of a step stand in the traces of torch's profiler."""

from __future__ import annotations

import itertools
import json

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from support.models import tokens
from support.pool import run_ranks
from support.runs import make_engine, train

PHASES = ("torchloom.forward", "torchloom.backward", "torchloom.step")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_trace_holds_the_phases_of_each_micro_step(tmp_path, backend: str | None) -> None:
    def fn(rank):
        engine, _ = make_engine(3, gradient_accumulation_steps=2)
        if backend:
            engine.compile(backend=backend)
        train(engine, rank, 1)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            train(engine, rank, 2, first=1)
        path = tmp_path / f"{rank}.json"
        trace.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]

    for events in run_ranks(2, fn):
        spans = [event for event in events if event.get("name") in PHASES and event["ph"] == "X"]
        spans.sort(key=lambda event: event["ts"])
        micro = ["torchloom.forward", "torchloom.backward"]
        assert [each["name"] for each in spans] == (micro * 2 + ["torchloom.step"]) * 2
        for one, other in itertools.pairwise(spans):
            assert one["dur"] > 0 and one["ts"] + one["dur"] <= other["ts"]
        gathers = [each for each in events if each.get("name", "").startswith("torchloom::")]
        assert any(_is_in(each, span) for each in gathers for span in spans[:1])


def _is_in(inner, outer) -> bool:
    end = outer["ts"] + outer["dur"]
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner.get("dur", 0) <= end


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(rank):
        made = []
        before = record_function.__init__

        def count(self, name, *args):
            made.append(name)
            before(self, name, *args)

        record_function.__init__ = count
        try:
            engine, _ = make_engine(0)
            train(engine, rank, 1)
            quiet = [name for name in made if name.startswith("torchloom.")]
            with profile(activities=[ProfilerActivity.CPU], acc_events=True):
                train(engine, rank, 1)
        finally:
            record_function.__init__ = before
        return quiet, [name for name in made if name.startswith("torchloom.")]

    quiet, profiled = run_ranks(1, fn)[0]
    assert quiet == [] and profiled == list(PHASES)


def test_a_phase_that_raises_ends_its_span(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(0)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            with pytest.raises(IndexError):
                engine(tokens(0, rank) + 1000)
            train(engine, rank, 1)
        return [event.name for event in trace.events() if event.name in PHASES]

    assert run_ranks(1, fn)[0] == ["torchloom.forward", *PHASES]
