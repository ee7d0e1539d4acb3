"""Names, places, ranks that are lost: an error on all ranks, the old checkpoint intact."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from support.checkpoints import die_at, leftovers, names_in, outcome
from support.ranks import run_ranks
from support.runs import assert_equal, make_engine, train, weights
from torchloom.checkpoints import choose as choosing
from torchloom.checkpoints import folder
from torchloom.checkpoints import write as writing
from torchloom.checkpoints.rank_task import RankTask
from torchloom.errors import CheckpointError, PeerLostError

BAD_TAGS = [
    "", ".", "..", "../x", "a/b", "/etc", ".hidden", "-x", "a\0b", "a b", "a\n", "x" * 300, "latest",
    "a\\b", "tag:1", "é", "$HOME", "*", True, 1.5, None.__class__, b"x", ["a"],
]  # fmt: skip


def test_tags_are_plain_names(tmp_path) -> None:
    root = tmp_path / "in" / "root"
    root.mkdir(parents=True)
    (tmp_path / "in" / "mine").write_text("keep")

    def fn(rank):
        engine, _ = make_engine(3)
        found = []
        for tag in BAD_TAGS:
            found.append(outcome(lambda tag=tag: engine.save_checkpoint(root, tag)))
            found.append(outcome(lambda tag=tag: engine.load_checkpoint(root, tag)))
        for tag in (7, "step=3,loss=0.1", "_x", "v1.0+a@b~c", "x" * 180):
            path = engine.save_checkpoint(tmp_path / "good", tag)
            assert engine.load_checkpoint(tmp_path / "good", tag)[0] == path
        return found

    for found in run_ranks(2, fn):
        for text in found:
            assert text.startswith("CheckpointError")
            assert "tag" in text
    assert names_in(root) == []
    assert names_in(tmp_path / "in") == ["mine", "root"]


def test_ranks_that_ask_for_different_ones(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path, "a")
        engine.save_checkpoint(tmp_path, "b")
        return [
            outcome(lambda: engine.save_checkpoint(tmp_path, f"t{rank}")),
            outcome(lambda: engine.save_checkpoint(tmp_path / str(rank))),
            outcome(lambda: engine.load_checkpoint(tmp_path, "ab"[rank])),
            outcome(lambda: engine.load_checkpoint(tmp_path, None if rank else "a")),
            outcome(
                lambda: (
                    engine.save_checkpoint(tmp_path, "..")
                    if rank
                    else engine.save_checkpoint(tmp_path, "x")
                )
            ),
            outcome(lambda: engine.load_checkpoint(tmp_path, "b")),
        ]

    for found in run_ranks(2, fn):
        assert all(text.startswith("CheckpointError") for text in found[:5]), found
        assert found[5] == "done"
    assert names_in(tmp_path) == [".torchloom.lock", "a", "b", "latest"]


def test_a_folder_that_is_not_shared(tmp_path) -> None:
    """Each rank sees another folder under one name, as on nodes with disks of their own."""

    def fn(rank):
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        engine, _ = make_engine(3)
        texts = [outcome(lambda: engine.save_checkpoint("ckpt"))]
        single = [outcome(lambda: engine.load_checkpoint("ckpt"))]
        return texts + single, names_in(tmp_path / str(rank))

    for (save, load), _ in run_ranks(2, fn):
        assert save.startswith("CheckpointError")
        assert "share" in save
        assert load.startswith("CheckpointError")
    assert leftovers(tmp_path / "0" / "ckpt") == []


def test_a_save_takes_nothing_of_others(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        if rank == 0:
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "notes").write_text("x")
            (tmp_path / "file").write_text("x")
            (tmp_path / "link").symlink_to(tmp_path / "mine")
            (tmp_path / ".torchloom-partial-mine").mkdir()
            (tmp_path / "x.partial").mkdir()
        found = [
            outcome(lambda tag=tag: engine.save_checkpoint(tmp_path, tag))
            for tag in ("mine", "file", "link")
        ]
        engine.save_checkpoint(tmp_path, "good")
        return found

    for found in run_ranks(2, fn):
        assert all(text.startswith("CheckpointError") for text in found)
        assert "notes" in found[0]
    assert (tmp_path / "mine" / "notes").read_text() == "x"
    assert (tmp_path / "file").read_text() == "x"
    assert {"x.partial", ".torchloom-partial-mine", "good"} <= set(names_in(tmp_path))


def test_a_tag_that_is_a_link(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path, "a")
        if rank == 0:
            (tmp_path / "best").symlink_to("a")
            (tmp_path / "next").symlink_to("nothing")
        found = [outcome(lambda t=t: engine.save_checkpoint(tmp_path, t)) for t in ("best", "next")]
        return [*found, names_in(tmp_path), engine.load_checkpoint(tmp_path, "best")[0]]

    for *texts, names, loaded in run_ranks(2, fn):
        for text in texts:
            assert text.startswith("CheckpointError")
            assert "is a symbolic link to" in text
            assert "choose another tag, or remove the link" in text
        assert names == [".torchloom.lock", "a", "best", "latest", "next"]
        assert loaded == str(tmp_path / "best")


def test_saving_into_a_checkpoint(tmp_path) -> None:
    """As with the path that a load returned."""

    def fn(rank):
        engine, _ = make_engine(3)
        path = engine.save_checkpoint(tmp_path, "a")
        before = names_in(tmp_path / "a")
        text = outcome(lambda: engine.save_checkpoint(tmp_path / "a" / "sub", "b"))
        return text, names_in(tmp_path / "a") == before, engine.load_checkpoint(tmp_path)[0] == path

    for text, *same in run_ranks(2, fn):
        assert f"{tmp_path / 'a'} is a checkpoint" in text
        assert f"such as {str(tmp_path)!r}" in text
        assert same == [True, True]


def test_another_current_folder_meanwhile(tmp_path) -> None:
    for name in "xy":
        (tmp_path / name).mkdir()

    def fn(rank):
        os.chdir(tmp_path / "x")
        real = writing._write_own

        def moved(*args):
            os.chdir(tmp_path / "y")
            return real(*args)

        writing._write_own = moved
        engine, _ = make_engine(3)
        path = engine.save_checkpoint("runs", "a", async_save=True)
        engine.wait_for_checkpoint()
        return path

    assert run_ranks(2, fn) == ["runs/a"] * 2
    assert names_in(tmp_path / "x" / "runs") == [".torchloom.lock", "a", "latest"]
    assert names_in(tmp_path / "y") == []


@pytest.fixture
def open_folder():
    """Return a folder that every user can reach and write to, as those of pytest cannot."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder is made by root")
def test_a_folder_that_others_closed(open_folder) -> None:
    """As lost+found, which every disk has at its root."""
    (open_folder / "lost+found").mkdir(mode=0o700)

    def fn(rank):
        engine, _ = make_engine(3)
        os.seteuid(12345)
        found = []
        for step in range(3):
            train(engine, rank, 1, first=step)
            found.append(outcome(lambda: engine.save_checkpoint(open_folder, keep_last=1)))
        said = []
        choosing.logger.warning = lambda *args: said.append(args[0] % args[1:])
        found.append(outcome(lambda: engine.load_checkpoint(open_folder)))
        return found, said, outcome(lambda: engine.load_checkpoint(open_folder, "lost+found"))

    for rank, (found, said, by_name) in enumerate(run_ranks(2, fn)):
        assert found == ["done"] * 4
        assert "lost+found/manifest.json cannot be read: Permission denied" in by_name
        if rank == 0:
            assert len(said) == 1
            assert "'lost+found' cannot be loaded" in said[0]
    assert names_in(open_folder) == [".torchloom.lock", "global_step3", "latest", "lost+found"]


# --- replacing, and being killed at any point


ON_DISK = [
    *((os, name) for name in ("fsync", "rmdir", "unlink")),
    (folder, "swap"),
    *((Path, name) for name in ("open", "rename", "unlink", "mkdir", "touch", "replace")),
]


def _run_and_die(root, who: int, call: int) -> bool:
    """Save the same tag again on two ranks, one of which is killed; say whether it was."""

    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 2)
        if rank == who:
            die_at(call, *ON_DISK)
        return outcome(lambda: engine.save_checkpoint(root, "best"))

    try:
        run_ranks(2, fn)
    except AssertionError as error:
        assert "died without a word" in str(error) or "Peer" in str(error), error
        return True
    return False


def _load(root):
    def fn(rank):
        engine, model = make_engine(3, seed=3)
        engine.load_checkpoint(root, "best")
        by_name = engine.global_steps, weights(model)
        engine.load_checkpoint(root)
        return by_name, engine.global_steps

    return run_ranks(2, fn)[0]


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_killed_while_a_tag_is_replaced(who, exchanges, tmp_path, monkeypatch) -> None:
    """At each of its operations on the disk: the old or the new checkpoint is there, whole."""
    if not exchanges:
        monkeypatch.setattr(folder, "swap", lambda left, right: False)
    expected = {}

    def first(rank):
        engine, model = make_engine(3)
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path, "best")
        expected[1] = weights(model)
        train(engine, rank, 1, first=1)
        return expected[1], weights(model)

    old, new = run_ranks(2, first)[0]
    seen, call = set(), 1
    steps = range(1, 60, 3) if who == 0 else range(1, 20, 4)
    for call in steps:
        died = _run_and_die(tmp_path, who, call)
        (step, loaded), newest = _load(tmp_path)
        assert step == newest
        assert_equal(loaded, old if step == 1 else new)
        seen.add(step)
        if not died:
            break
        if step == 2:  # begin again with the old one
            run_ranks(2, first)
    assert not died
    assert seen == {1, 2}
    assert leftovers(tmp_path) == []


# --- ranks that are lost


def test_a_rank_that_leaves_a_task_while_others_wait() -> None:
    def fn(rank):
        if rank == 1:
            with suppress(KeyError), RankTask(rank, 2, "work") as ranks:
                ranks.texts("1")
                raise KeyError
            return "left"
        with (
            pytest.raises(PeerLostError, match="rank 1 has left"),
            RankTask(rank, 2, "work") as ranks,
        ):
            assert ranks.texts("0") == ["0", "1"]
            ranks.texts("0")
        return "told"

    assert run_ranks(2, fn) == ["told", "left"]


def test_nothing_piles_up(tmp_path) -> None:
    """Threads, descriptors and files stay as many over saves and loads."""
    import threading
    from pathlib import Path

    def fn(rank):
        engine, _ = make_engine(3)
        seen = []
        for step in range(12):
            engine.save_checkpoint(tmp_path, keep_last=2, tag=f"t{step}", async_save=step % 2 == 0)
            engine.load_checkpoint(tmp_path)
            engine.wait_for_checkpoint()
            fds = len(list(Path("/proc/self/fd").iterdir()))
            seen.append((fds, threading.active_count()))
        return seen

    for seen in run_ranks(2, fn):
        early, late = seen[:4], seen[4:]
        # A save in the background may still hold a connection; a leak would be one for each of eight.
        assert max(fds for fds, _ in late) <= max(fds for fds, _ in early) + 2
        assert max(threads for _, threads in late) <= max(threads for _, threads in early)
    assert len(names_in(tmp_path)) == 4


@pytest.mark.parametrize("folder", ["", None])
def test_no_folder_is_an_error_in_one_sentence(folder) -> None:
    def fn(rank):
        engine, _ = make_engine()
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
            with pytest.raises(
                CheckpointError, match=f"need a folder, got {folder!r}: pass its path"
            ):
                call(folder)

    run_ranks(1, fn)
