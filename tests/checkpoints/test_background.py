"""Saving while training goes on: what is saved, what a failure does, what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from support.checkpoints import leftovers, names_in, outcome, save_steps, state_of
from support.ranks import run_ranks
from support.runs import assert_equal, make_engine, train, weights
from torchloom.checkpoints import write as writing
from torchloom.checkpoints.choose import candidates
from torchloom.checkpoints.service import Checkpoints


def slow_disk(seconds):
    """Let each rank's write take a while, on this process."""
    real = writing._write_own

    def slow(*args):
        time.sleep(seconds)
        return real(*args)

    writing._write_own = slow


def test_what_is_saved_is_the_moment_of_the_call(tmp_path) -> None:
    def fn(rank):
        may_write, real = threading.Event(), writing._write_own

        def held(*args):
            assert may_write.wait(120)
            return real(*args)

        writing._write_own = held
        engine, model = make_engine(3)
        train(engine, rank, 2)
        saved = weights(model), state_of(engine)
        path = engine.save_checkpoint(tmp_path, async_save=True)
        train(engine, rank, 3, first=2)
        may_write.set()
        engine.wait_for_checkpoint()
        assert path == str(tmp_path / "global_step2")
        engine.load_checkpoint(tmp_path)
        return saved, (weights(model), state_of(engine))

    for saved, loaded in run_ranks(2, fn):
        assert_equal(saved[0], loaded[0])
        assert saved[1] == loaded[1]


def test_one_at_a_time(tmp_path) -> None:
    def fn(rank):
        slow_disk(0.3)
        engine, _ = make_engine(3)
        for _ in range(3):
            train(engine, rank, 1)
            engine.save_checkpoint(tmp_path, async_save=True)
            threads = [t.name for t in threading.enumerate() if t.name.startswith("checkpoint g")]
            assert len(threads) <= 1
        engine.destroy()
        assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]

    run_ranks(2, fn)
    steps = [f"global_step{step}" for step in (1, 2, 3)]
    assert names_in(tmp_path) == [".torchloom.lock", *steps, "latest"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_is_raised_on_all_ranks(who, tmp_path) -> None:
    def fails(handle):
        raise OSError(28, "No space left on device")

    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 1)
        real, found = os.fsync, []

        def steps():
            for step in range(2, 2000):
                train(engine, rank, 1, first=step)
                time.sleep(0.01 * rank)

        for action in (
            steps,
            engine.wait_for_checkpoint,
            lambda: engine.save_checkpoint(tmp_path),
            lambda: engine.load_checkpoint(tmp_path),
            engine.destroy,
        ):
            engine.save_checkpoint(tmp_path, "before")
            if rank == who:
                os.fsync = fails
            train(engine, rank, 1, first=1)
            engine.save_checkpoint(tmp_path, async_save=True)
            found.append((outcome(action), engine.global_steps))
            os.fsync = real  # it was told once; training goes on
        return found

    first, second = run_ranks(2, fn)
    assert first == second  # after the same step
    for text, _ in first:
        assert text.startswith("CheckpointError"), text
        assert f"rank {who}" in text
        assert "No space left on device" in text


SCRIPT = """
import sys, time
sys.path[:0] = {path!r}
from support.runs import make_engine, train
from torchloom.checkpoints import write as writing
real = writing._write_own
def slow(*args):
    time.sleep(1)
    return real(*args)
writing._write_own = slow
engine, _ = make_engine(3)
train(engine, 0, 1)
engine.save_checkpoint({root!r}, async_save=True)
"""


def test_the_process_ends_after_the_save(tmp_path) -> None:
    script = SCRIPT.format(path=sys.path, root=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert names_in(tmp_path / "global_step1")
    assert leftovers(tmp_path) == []


# --- keep the last N


@pytest.mark.parametrize("background", [False, True])
def test_keep_last(background, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")

    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path, "best", save_latest=False)
        for step in range(5):
            train(engine, rank, 1, first=step)
            engine.save_checkpoint(tmp_path, f"s{step}", keep_last=2, async_save=background)
        engine.wait_for_checkpoint()
        names = names_in(tmp_path)
        path, _ = engine.load_checkpoint(tmp_path)
        return names, path, outcome(lambda: engine.save_checkpoint(tmp_path, keep_last=0))

    names, path, text = run_ranks(2, fn)[0]
    assert names == [".torchloom.lock", "best", "latest", "mine", "s3", "s4"]
    assert path.endswith("s4")
    assert "keep_last=0" in text


def test_damaged_ones_do_not_count_as_kept(tmp_path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "global_step3" / "rank_1.json").unlink()
    (tmp_path / "global_step4" / "manifest.json").write_text("{}")
    save_steps(tmp_path, 5, checkpoint={"keep_last": 2})
    names = set(names_in(tmp_path))
    assert {"global_step5", "global_step2"} <= names  # the newest two that are whole
    assert "global_step1" not in names


def test_a_tag_that_is_saved_again_is_the_newest(tmp_path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    save_steps(tmp_path, 2)
    assert [each.tag[-1] for each in candidates(tmp_path)] == ["2", "3", "1"]
    assert (tmp_path / "latest").read_text() == "global_step2\n"


def test_not_the_latest(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path, "s0")
        engine.save_checkpoint(tmp_path, "s1", save_latest=False)
        return [engine.load_checkpoint(tmp_path, tag)[0][-2:] for tag in (None, "s1")]

    assert run_ranks(1, fn) == [["s0", "s1"]]
    assert (tmp_path / "latest").read_text() == "s0\n"


def test_keys_of_the_config(tmp_path) -> None:
    def fn(rank):
        slow_disk(0.3)
        engine, _ = make_engine(3, checkpoint={"async_save": True, "keep_last": 1})
        for step in range(2):
            train(engine, rank, 1, first=step)
            engine.save_checkpoint(tmp_path)
            assert engine._checkpoints._pending is not None
        engine.save_checkpoint(tmp_path, "last", async_save=False, keep_last=2)
        assert engine._checkpoints._pending is None

    run_ranks(2, fn)
    assert set(names_in(tmp_path)) - {".torchloom.lock"} == {"global_step2", "last", "latest"}


class OnDevice(torch.Tensor):
    """Says that it is on a GPU that is not the current one."""

    @property
    def device(self):
        return torch.device("cuda", 1)


def test_copies_are_waited_for_on_the_device_that_they_come_from(monkeypatch) -> None:
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(str(device)))
    found = {}

    class State:
        def staged(self, copy):
            found.update(a=copy("a", OnDevice([1.0, 2.0])), b=copy("b", torch.zeros(2)))

    service = Checkpoints(agreement=None)
    service._staging = {"a": torch.empty(2)}  # else it is made of pinned memory
    service._staged(State())
    assert waited == ["cuda:1"]
    assert found["a"].tolist() == [1, 2]
