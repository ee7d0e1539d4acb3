"""`keep_last`: what is removed, what stays, and that it cannot make a save fail."""

from __future__ import annotations

import shutil

from support.checkpoints import leftovers, names_in, outcome
from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom.checkpoints import folder


def save(root, keep, steps, *, before=None, background=False):
    """Save after each step, keeping so many; `before(root, step)` runs on rank 0 before the save."""

    def fn(rank):
        engine, _ = make_engine(3)
        found = []
        for step in steps:
            train(engine, rank, 1, first=step)
            if before is not None:
                engine.wait_for_checkpoint()
                if rank == 0:
                    before(root, step)
            found.append(
                outcome(
                    lambda step=step: engine.save_checkpoint(
                        root, f"s{step}", keep_last=keep, async_save=background
                    )
                )
            )
        found.append(outcome(engine.wait_for_checkpoint))
        return found, [outcome(lambda: engine.load_checkpoint(root)), engine.global_steps]

    return run_ranks(2, fn)


def tags_in(root):
    return [name for name in names_in(root) if not name.startswith(".") and name != "latest"]


def test_a_checkpoint_that_was_renamed_stays(tmp_path) -> None:
    def rename(root, step):
        if step == 2:
            (root / "s1").rename(root / "best")

    found = save(tmp_path, 1, range(1, 5), before=rename, background=True)
    assert found == [(["done"] * 5, ["done", 4])] * 2
    assert tags_in(tmp_path) == ["best", "s4"]
    assert folder.is_checkpoint(tmp_path / "best")


def test_a_checkpoint_that_a_link_points_to_stays(tmp_path) -> None:
    def link(root, step):
        if step == 2:
            (root / "best").symlink_to("s1/engine.json")
            (root / "circle").symlink_to("circle")

    save(tmp_path, 2, range(1, 6), before=link)
    assert tags_in(tmp_path) == ["best", "circle", "s1", "s4", "s5"]
    assert (tmp_path / "best").exists()


def test_a_link_does_not_count(tmp_path) -> None:
    """A link to the newest is not one of those that are kept, nor are links to other places."""
    save(tmp_path / "other", 1, [1])

    def link(root, step):
        if step == 3:
            (root / "best").symlink_to("s2")
            (root / "start").symlink_to(tmp_path / "other" / "s1")

    save(tmp_path / "runs", 2, [1, 2], before=link)
    save(tmp_path / "runs", 2, [3], before=link)
    assert tags_in(tmp_path / "runs") == ["best", "s2", "s3", "start"]
    save(tmp_path / "runs", 1, [3])
    assert tags_in(tmp_path / "runs") == ["best", "s2", "s3", "start"]
    assert (tmp_path / "runs" / "start" / "manifest.json").exists()


def test_a_checkpoint_that_vanishes_meanwhile(tmp_path) -> None:
    """Somebody else cleans up: the others are pruned all the same."""
    save(tmp_path, None, [1, 2, 3])

    def fn(rank):
        engine, _ = make_engine(3)
        real = folder.foreign_files

        def vanishing(path):
            if path.name == "s2":
                shutil.rmtree(path)
            return real(path)

        folder.foreign_files = vanishing
        return outcome(lambda: engine.save_checkpoint(tmp_path, "s4", keep_last=1))

    assert run_ranks(2, fn) == ["done"] * 2
    assert tags_in(tmp_path) == ["s4"]
    assert leftovers(tmp_path) == []


def test_pruning_that_fails_is_a_warning(tmp_path) -> None:
    save(tmp_path, None, [1])

    def fn(rank):
        engine, _ = make_engine(3)

        def fails(path):
            raise OSError(116, "Stale file handle")

        folder.foreign_files, real = fails, folder.foreign_files
        folder.check_replaceable = lambda path: None
        first = outcome(lambda: engine.save_checkpoint(tmp_path, "s2", keep_last=1))
        folder.foreign_files = real
        return first, outcome(lambda: engine.save_checkpoint(tmp_path, "s3", keep_last=1))

    assert run_ranks(2, fn) == [("done", "done")] * 2
    assert tags_in(tmp_path) == ["s3"]
