"""Saves on the way, checkpoints that go, and failures that become one sentence."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from recipes.test_train_loop import Rows, make_loop
from torchloom import cli, envs
from torchloom.cli.terminal import LastingOutput
from torchloom.errors import ConfigError, NoMemoryError, PlanError
from torchloom.recipes.train import interrupts
from torchloom.recipes.train.interrupts import StopRequest, failing_in, full_memory

FULL = [
    (RuntimeError("[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: can't allocate memory: "
                  "you tried to allocate 400 bytes. Error code 12"), "host"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "device"),
    (RuntimeError("CUDA error: out of memory"), "device"),
]  # fmt: skip


def raised_from(path: str, error: Exception) -> None:
    """Raise an error that has passed through a file of this name."""
    code = compile("def run(error): raise error", path, "exec")
    names: dict = {}
    exec(code, names)
    names["run"](error)


@pytest.mark.parametrize(("error", "memory"), FULL)
def test_full_memory_is_known_by_any_of_its_names(error, memory: str) -> None:
    with (
        pytest.raises(NoMemoryError, match=f"rank 3 ran out of {memory} memory in step 2"),
        failing_in("in step 2", rank=3),
    ):
        raise error


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        ("/x/torchloom/plan/search.py", "while planning"),
        ("/x/torch/_inductor/compile_fx.py", "while compiling"),
        ("/x/torch/distributed/checkpoint/writer.py", "while saving or loading a checkpoint"),
        ("/x/model.py", "in step 2"),
    ],
)
def test_the_phase_is_where_memory_ran_out(path: str, phase: str) -> None:
    with pytest.raises(NoMemoryError, match=phase), failing_in("in step 2", rank=3):
        try:
            raised_from(path, MemoryError())
        except MemoryError as error:  # compilers wrap what they raise
            raise RuntimeError("backend='x' raised: MemoryError") from error


def test_other_errors_stay_themselves() -> None:
    for error in (PlanError("no plan fits"), ValueError("a"), RuntimeError("b"), OSError(2, "c")):
        assert full_memory(error) is None
        with pytest.raises(type(error)) as caught, failing_in("in step 2", rank=3):
            raise error
        assert caught.value is error


def test_saves_on_the_way(tmp_path) -> None:
    loop, engine = make_loop(tmp_path, steps=12, save_every=5)
    steps = []
    save, engine.save_checkpoint = engine.save_checkpoint, lambda *args, **kwargs: (
        steps.append(engine.global_steps) or save(*args, **kwargs)
    )  # fmt: skip
    loop.run()
    assert steps == [5, 10, 12]


def test_without_steps_one_checkpoint_is_saved_anew_by_the_clock(tmp_path) -> None:
    loop, engine = make_loop(tmp_path, steps=3, save_minutes=1e-9)
    tags = []
    save, engine.save_checkpoint = engine.save_checkpoint, lambda folder, tag, **kwargs: (
        tags.append(tag) or save(folder, tag, **kwargs)
    )  # fmt: skip
    loop.run()
    assert tags == ["on_the_way", "on_the_way", None]
    loop, engine = make_loop(tmp_path, steps=3, save_minutes=60)
    loop.run()
    assert len(engine.saved) == 1


def test_hangup_saves_after_the_step_and_goes_on(tmp_path) -> None:
    def on_step(row):
        if row.step == 4:
            os.kill(os.getpid(), signal.SIGHUP)

    loop, engine = make_loop(tmp_path, Rows(on_step).log, steps=8)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup themselves
    try:
        outcome = loop.run()
        assert outcome.steps == 8
        assert outcome.stopped_by is None
        assert len(engine.saved) == 2
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_hangup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.take_save()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_full_memory_in_a_step_and_in_a_save(tmp_path) -> None:
    loop, engine = make_loop(tmp_path, steps=3)
    backward = engine.backward

    def full(loss):
        if engine.global_steps == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        backward(loss)

    engine.backward = full
    with pytest.raises(NoMemoryError, match="in the step after step 1: use a smaller"):
        loop.run()

    def no_room(*args, **kwargs):
        raise MemoryError

    loop, engine = make_loop(tmp_path, steps=3)
    engine.save_checkpoint = no_room
    with pytest.raises(NoMemoryError, match="in the step after step 3"):
        loop.run()


def test_output_that_nobody_reads_is_dropped() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w", buffering=1)
    lasting = LastingOutput(stream)
    assert lasting.write("step 1\n") == 7
    lasting.flush()
    assert not lasting.isatty()
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("stage 7 is not one"), "ConfigError: stage 7 is not one"),
        (KeyError("embed"), "torchloom train raised KeyError: 'embed'"),
    ],
)
def test_a_traceback_is_shown_where_it_is_asked_for(
    monkeypatch, capsys, error, words: str, switch: str
) -> None:
    def fail(asked):
        return lambda: raised_from("/home/someone/model.py", error)

    for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "make_app", fail)
    monkeypatch.setattr(sys, "argv", ["torchloom", "train"])
    monkeypatch.setenv(envs.TRACEBACK, switch)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert words in said
    assert ("Traceback" in said) == (switch == "1")
    assert ("/home/someone/model.py" in said) == (switch == "1" or isinstance(error, KeyError))


def test_phases_name_files_that_exist() -> None:
    """Phases are known by paths: when files move, these must move with them."""
    source = Path(cli.__file__).parents[1]
    files = [str(path.as_posix()) for path in source.rglob("*.py")]
    for _, places in interrupts._PHASES:
        for place in places:
            if place.startswith("/torchloom/"):
                assert any(place in file for file in files), place
