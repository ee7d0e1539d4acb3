"""What the user sees and keeps: lines, bar, table, charts, summary."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from torchloom.files import read_json_lines
from torchloom.recipes.train.metrics import (
    TENSORBOARD_TAGS,
    json_lines,
    print_summary,
    shown,
    summarize,
    tensorboard,
)


def step_row(step, **changes):
    values = {
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 100 * step,
        "step_time_s": 30.0 if step == 1 else 0.5,
        "data_time_s": 0.01,
        "tokens_per_s": 200.0,
        "tflops_per_s": 0.25,
        "mfu": None,
        "memory_gib": 1.0,
        "peak_memory_gib": 1.5,
        "collectives": 12,
        "collective_bytes": 3 << 20,
    }
    return {"kind": "step", "step": step, **values, **changes}


def eval_row(step, loss):
    return {"kind": "eval", "step": step, "heldout_loss": loss}


@pytest.fixture
def rows(tmp_path):
    with json_lines(tmp_path / "metrics.jsonl") as log:
        log(eval_row(0, 5.5))
        for step in range(1, 6):
            log(step_row(step))
        log(eval_row(5, 2.25))
    return read_json_lines(tmp_path / "metrics.jsonl")


def make_summary(rows, **changes):
    facts = {
        "model": "llama-tiny",
        "num_params": 1_900_000,
        "unit": "byte",
        "world_size": 2,
        "device": "CPU",
        "zero_stage": 3,
        "steps": 5,
        "peak_memory_gib": 1.5,
        "compile_time_s": 31.4,
        "num_graphs": 2,
        "num_fallbacks": 1,
        "stopped_by": None,
        "checkpoint": "out/checkpoints/global_step5",
    }
    return summarize(rows, **{**facts, **changes})


SHOWN = {"steps": 5, "done": 0, "first": "compiling", "unit": "byte", "phase": str}


def show(draw, **options):
    file = io.StringIO()
    draw(Console(file=file, width=100, **options))
    return file.getvalue()


def test_the_summary_takes_medians_and_the_table_shows_them(rows, tmp_path):
    summary = make_summary(rows)
    assert (summary["step_time_median_s"], summary["tokens"]) == (0.5, 500)
    assert (summary["collectives_per_step"], summary["collective_mib_per_step"]) == (12, 3.0)
    text = show(lambda c: print_summary(c, summary, {"loss": tmp_path / "loss.svg"}))
    for part in (
        "5.500 -> 2.250 nats/byte",
        "500 ms",
        "200 tokens/s",
        "1.50 GiB",
        "12 per step",
        "2 graphs in 31 s, 1 ran eagerly",
    ):
        assert part in text
    assert "n/a (no known peak)" in text
    assert str(tmp_path / "loss.svg") in text.replace("\n", "")
    assert summary["heldout_loss_last"] == 2.25


def test_a_stopped_run_says_so_and_when_it_was_last_evaluated(rows):
    summary = make_summary(rows[:4], steps=3, stopped_by="SIGINT")
    text = show(lambda c: print_summary(c, summary, {}))
    assert "stopped by SIGINT" in text
    assert "5.500 -> 5.500 nats/byte, step 0" in text


def test_plain_lines_come_for_the_first_and_every_nth_step():
    def draw(console):
        with shown(console, log_every=2, **SHOWN) as log:
            log(eval_row(0, 5.5))
            for step in range(1, 6):
                log(step_row(step, mfu=0.5))

    lines = show(draw).splitlines()
    assert lines[0] == "step 0: held-out loss 5.500 nats/byte"
    assert lines[1] == "compiling ..."
    assert [line.split("  ")[0] for line in lines[2:]] == [f"step {k}/5" for k in (1, 2, 4, 5)]
    assert "loss 1.000  200 tokens/s  500 ms/step  1.00 GiB  MFU 50.0%" in lines[-1]


def test_a_terminal_gets_a_bar_which_shows_what_a_compile_does():
    told = threading.Event()

    def phase():
        told.set()
        return "planning graph0 (3 s)"

    def draw(console):
        with shown(console, log_every=2, **{**SHOWN, "phase": phase}) as log:
            log(eval_row(0, 4.5))
            assert told.wait(10)
            told.clear()
            assert told.wait(10)  # the first text is out
            log(step_row(2))

    text = show(draw, force_terminal=True)
    assert "2/5" in text and "loss 2.500" in text and "held-out loss" in text
    assert "planning graph0 (3 s)" in text


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard(tmp_path) as log:
        log(step_row(1, mfu=0.5))
        log(eval_row(1, 5.0))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(TENSORBOARD_TAGS.values())
