"""The sections tensorboard, wandb and csv_monitor: DeepSpeed's names and folders, written by rank 0."""

from __future__ import annotations

import csv
import os
import resource
import sys
import types
from pathlib import Path

import pytest

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import hears, make_engine, settings, train
from torchloom.config import load_config
from torchloom.config.monitors import require_packages
from torchloom.errors import ConfigError
from torchloom.events import Recorder, StepEnded

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def ended(recorder: Recorder) -> list[StepEnded]:
    return [event for event in recorder.events if isinstance(event, StepEnded)]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def warnings_of(fn) -> list[str]:
    told = hears()
    fn()
    return [*told]


@pytest.mark.parametrize("stage", [0, 3])
def test_csv_files_have_deepspeeds_names_and_samples(tmp_path, stage: int) -> None:
    section = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "run"}

    def fn(rank):
        engine, _ = make_engine(stage, csv_monitor=section, gradient_accumulation_steps=2, **FP16)
        with Recorder() as recorder:
            train(engine, rank, 3)
        return ended(recorder)

    told, _ = run_ranks(2, fn)
    folder = tmp_path / "logs" / "run"
    header, *losses = rows(folder / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [(int(step), float(loss)) for step, loss in losses] == [
        (each.samples, each.loss) for each in told
    ]
    assert [each.samples for each in told] == [12, 24, 36]
    assert rows(folder / "Train_Samples_lr.csv")[1] == ["12", "0.01"]
    assert rows(folder / "Train_Samples_loss_scale.csv")[3] == ["36", "256.0"]
    assert [float(row[1]) for row in rows(folder / "torchloom_grad_norm.csv")[1:]] == [
        each.grad_norm for each in told
    ]


def test_a_resumed_run_goes_on_in_its_csv_files(tmp_path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path)}

    def fn(rank):
        for _ in range(2):
            engine, _ = make_engine(0, csv_monitor=section)
            train(engine, rank, 2)
            engine.destroy()
        return True

    run_ranks(1, fn)
    found = rows(tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv")
    assert [row[0] for row in found] == ["step", "3", "6", "3", "6"]


def test_default_folders_are_those_of_deepspeed(tmp_path) -> None:
    def fn(rank):
        os.chdir(tmp_path)
        engine, _ = make_engine(0, csv_monitor={"enabled": True}, tensorboard={"enabled": True})
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        train(engine, rank, 1)
        engine.destroy()
        return True

    pytest.importorskip("tensorboard")
    run_ranks(1, fn)
    names = {path.name.split(".")[0] for path in (tmp_path / "DeepSpeedJobName").iterdir()}
    assert {"events", "Train_Samples_train_loss", "Train_Samples_lr"} <= names
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_tensorboard_gets_every_number(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "a/b"}

    def fn(rank):
        engine, _ = make_engine(3, tensorboard=section)
        with Recorder() as recorder:
            train(engine, rank, 3)
        engine.destroy()
        return ended(recorder)

    told, _ = run_ranks(2, fn)
    folder = tmp_path / "a" / "b"
    assert len(list(folder.iterdir())) == 1  # of rank 0
    found = EventAccumulator(str(folder))
    found.Reload()
    for name, values in {
        "Train/Samples/train_loss": [each.loss for each in told],
        "Train/Samples/lr": [each.lr for each in told],
        "torchloom/grad_norm": [each.grad_norm for each in told],
        "torchloom/tokens_per_second": [each.tokens_per_second for each in told],
        "torchloom/peak_bytes": [each.peak_bytes for each in told],
    }.items():
        scalars = found.Scalars(name)
        assert [each.step for each in scalars] == [6, 12, 18]
        assert [each.value for each in scalars] == pytest.approx(values, rel=1e-6)
    assert "Train/Samples/loss_scale" not in found.Tags()["scalars"]


class FakeRun:
    def __init__(self, **asked) -> None:
        self.asked = asked
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, data, step=None) -> None:
        self.logged.append((step, data))


def fake_wandb(run=None, error: Exception | None = None) -> types.ModuleType:
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(origin="wandb/__init__.py")
    module.run, module.started = run, []

    def init(**asked):
        if error is not None:
            raise error
        module.started.append(FakeRun(**asked))
        return module.started[-1]

    module.init = init
    return module


def test_wandb_starts_a_run_on_rank_0() -> None:
    section = {"enabled": True, "project": "p", "entity": "e", "group": "g"}

    def fn(rank):
        sys.modules["wandb"] = module = fake_wandb()
        engine, _ = make_engine(3, wandb=section)
        num_started = len(module.started)
        train(engine, rank, 2)
        return num_started, [(run.asked, run.logged) for run in module.started]

    (early, ((asked, logged),)), (_, none) = run_ranks(2, fn)
    assert early == 1 and none == []
    assert asked == {"project": "p", "entity": "e", "group": "g"}
    assert [step for step, _ in logged] == [6, 12]
    for _, data in logged:
        assert data["Train/Samples/train_loss"] == data["torchloom/loss"] > 1
        assert data["torchloom/grad_norm"] > 0


def test_a_monitor_that_cannot_be_opened_costs_one_warning() -> None:
    def fn(rank):
        sys.modules["wandb"] = fake_wandb(error=ConnectionError("no route to host"))

        def run():
            engine, _ = make_engine(3, wandb={"enabled": True})
            train(engine, rank, 3)

        return warnings_of(run)

    told, none = run_ranks(2, fn)
    told = [text for text in told if "wandb" in text]
    assert len(told) == 1 and none == []
    assert "wandb of the config failed (ConnectionError: no route to host)" in told[0]


def test_a_full_disk_costs_a_warning_and_writing_goes_on_later(tmp_path) -> None:
    """A limit on the size of files stands for a disk that is full for a while."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"enabled": True, "output_path": str(tmp_path)}
    limit = resource.RLIMIT_FSIZE

    def fn(rank):
        engine, _ = make_engine(3, tensorboard=section, csv_monitor=section)
        train(engine, rank, 1)
        before = resource.getrlimit(limit)
        if rank == 0:
            resource.setrlimit(limit, (30, before[1]))
        try:
            told = warnings_of(lambda: train(engine, rank, 3, first=1))
        finally:
            resource.setrlimit(limit, before)
        told += warnings_of(lambda: train(engine, rank, 8, first=4))
        engine.destroy()
        return told, engine.global_steps

    (told, steps), (none, _) = run_ranks(2, fn)
    assert steps == 12 and none == []
    assert [text.partition(" of the config failed")[0].split(": ")[1] for text in told] == [
        "tensorboard", "csv_monitor",
    ]  # fmt: skip
    folder = tmp_path / "DeepSpeedJobName"
    assert rows(folder / "Train_Samples_lr.csv")[-1][0] == str(12 * 6)
    samples = []
    for path in folder.glob("events.*"):
        found = EventAccumulator(str(path))
        found.Reload()
        if "Train/Samples/lr" in found.Tags()["scalars"]:
            samples += [each.step for each in found.Scalars("Train/Samples/lr")]
    assert {6, 12 * 6} <= set(samples)


def test_a_server_that_is_down_is_asked_less_and_less() -> None:
    def fn(rank):
        engine, _ = make_engine(0)
        asked = []

        def down(metrics, step):
            asked.append(step)
            raise TimeoutError("no answer")

        engine.log_to(down)
        told = warnings_of(lambda: train(engine, rank, 20))
        return asked, told

    ((asked, told),) = run_ranks(1, fn)
    assert asked == [1, 2, 4, 8, 16]
    assert len(told) == 1


def test_a_package_that_is_missing_is_refused_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("wandb", "tensorboard"):
        config = settings(0, **{name: {"enabled": True}})
        with pytest.raises(ConfigError, match=rf"{name}.enabled: the package {name} is not inst"):
            torchloom.initialize(model=tricky(), config=config)
    require_packages(load_config({"csv_monitor": {"enabled": True}}).monitors)


@pytest.mark.parametrize("whole", [False, True])
def test_an_own_loop_says_that_sections_are_for_engines(whole: bool) -> None:
    def fn(rank):
        config = load_config(settings(3, csv_monitor={"enabled": True}), world_size=2)
        model = tricky()

        def run():
            torchloom.shard_model(model, **({"config": config} if whole else {"stage": 3}))
            if not whole:
                torchloom.compile(model, config=config, backend="aot_eager")
            model(tokens(0, rank)).backward()

        return [text for text in warnings_of(run) if "csv_monitor" in text]

    told, none = run_ranks(2, fn)
    assert len(told) == 1 and none == [] and "log_to" in told[0]
