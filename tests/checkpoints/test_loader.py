"""The data goes on where it was: in the middle of an epoch, in the same order, nothing twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

import torchloom
from support.checkpoints import outcome
from support.models import tricky
from support.ranks import run_ranks
from support.runs import settings


class Numbers(Dataset):
    def __init__(self, length=37):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(37))


class Tracking(Stream):
    """An iterable dataset with a position of its own."""

    at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield torch.tensor(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make(data, seed=0, micro=3, drop=False):
    config = {
        **settings(3, train_micro_batch_size_per_gpu=micro),
        "seed": 5,
        "dataloader_drop_last": drop,
    }
    engine, _, loader, _ = torchloom.initialize(
        model=tricky(seed), config=config, training_data=data
    )
    return engine, loader


def batches(loader, epochs, after=lambda: None, stop=None):
    """Return the batches of all epochs, with a random number after each; stop after some."""
    found = []
    for epoch in epochs:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            found.append((epoch, batch.tolist(), torch.rand(()).item()))
            if len(found) == stop:
                return found
    return found


@pytest.mark.parametrize("data", [Numbers, Stream, Tracking])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 6, 7, 8])
def test_goes_on_in_the_middle_of_an_epoch(data, drop, stop, tmp_path) -> None:
    epochs = (0,) if data is Tracking else (0, 1, 2)

    def fn(rank):
        torch.manual_seed(rank)
        _, loader = make(data(), drop=drop)
        torch.manual_seed(rank)
        through = batches(loader, epochs)
        engine, loader = make(data(), drop=drop)
        torch.manual_seed(rank)
        first = batches(loader, epochs, stop=stop)
        engine.save_checkpoint(tmp_path)
        engine, loader = make(data(), seed=1, drop=drop)
        torch.manual_seed(99)
        engine.load_checkpoint(tmp_path)
        again = engine.training_dataloader.state_dict()
        rest = batches(loader, [e for e in epochs if e >= first[-1][0]])
        return through, first + rest, again

    for through, resumed, state in run_ranks(2, fn):
        assert resumed == through
        assert state["dataset"]["at"] if data is Tracking else state["samples"]


def test_another_epoch_begins_at_its_beginning(tmp_path) -> None:
    def fn(rank):
        engine, loader = make(Numbers())
        batches(loader, [0], stop=2)
        engine.save_checkpoint(tmp_path)
        whole = [b for _, b, _ in batches(loader, [1])]
        engine, loader = make(Numbers())
        engine.load_checkpoint(tmp_path)
        assert [b for _, b, _ in batches(loader, [1])] == whole
        assert len([b for _, b, _ in batches(loader, [0])]) == len(whole)

    run_ranks(1, fn)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 3), (1, 3)), ((1, 2), (2, 3)), ((4, 1), (2, 2))]
)
def test_other_ranks_and_batches_read_the_rest(before, after, tmp_path) -> None:
    def save(rank):
        engine, loader = make(Numbers(36), micro=before[1])
        first = batches(loader, [0], stop=4)
        engine.save_checkpoint(tmp_path)
        return [x for _, batch, _ in first for x in batch]

    def load(rank):
        engine, loader = make(Numbers(36), micro=after[1])
        engine.load_checkpoint(tmp_path)
        return [x for _, batch, _ in batches(loader, [0]) for x in batch]

    seen = [x for each in run_ranks(before[0], save) for x in each]
    rest = [x for each in run_ranks(after[0], load) for x in each]
    assert sorted(seen + rest) == list(range(36))


def test_other_data_is_refused(tmp_path) -> None:
    def fn(rank):
        engine, loader = make(Numbers(36))
        batches(loader, [0], stop=2)
        engine.save_checkpoint(tmp_path)
        engine, loader = make(Numbers(35))
        text = outcome(lambda: engine.load_checkpoint(tmp_path))
        return text, len(batches(loader, [0]))

    for text, left in run_ranks(2, fn):
        assert "length is 36, here it is 35" in text
        assert left == 6


class Foreign:
    """A loader of the caller's, with a position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_loader_of_the_callers(tmp_path) -> None:
    def save(rank):
        engine, _ = make(None)
        engine.training_dataloader = loader = Foreign()
        for _, _ in zip(range(3 + rank), loader, strict=False):
            pass
        engine.save_checkpoint(tmp_path)
        return loader.at

    def load(rank):
        engine, _ = make(None)
        engine.training_dataloader = loader = Foreign()
        engine.load_checkpoint(tmp_path)
        return loader.at

    saved = run_ranks(2, save)
    assert saved[0] != saved[1]
    assert run_ranks(2, load) == saved
    assert run_ranks(1, load) == [0]  # means nothing to another number of ranks


def read(loader, epochs, at=None, act=lambda found: None, sets_epoch=True):
    """Return the batches of epochs; act after batch `at` = (epoch, index), or around a pass."""
    found = []
    for epoch in epochs:
        if sets_epoch:
            loader.sampler.set_epoch(epoch)
        if at == (epoch, "first"):
            act(found)
        for index, batch in enumerate(loader):
            found.append((epoch, batch.tolist()))
            if at == (epoch, index):
                act(found)
        if at == (epoch, "over"):
            act(found)
    return found


def save_at(at, data, path, **rest):
    """Return what is read after a checkpoint was saved at a place of four passes."""
    engine, loader = make(data())
    before = []

    def act(found):
        before.extend(found)
        engine.save_checkpoint(path)

    return read(loader, range(4), at, act, **rest)[len(before) :]


def loaded(data, path, **rest):
    """Return the loader of a run that goes on."""
    engine, loader = make(data(), seed=1, **rest)
    engine.load_checkpoint(path)
    return loader


@pytest.mark.parametrize("at", [(1, "first"), (1, 0), (1, 6), (1, "over"), (2, "over")])
def test_epochs_go_on_where_they_were(at, tmp_path) -> None:
    def load(rank):
        loader = loaded(Numbers, tmp_path)
        return read(loader, range(loader.sampler.epoch, 4))  # as docs/checkpoints.md shows

    through = run_ranks(2, lambda rank: save_at(at, Numbers, tmp_path))
    assert run_ranks(2, load) == through
    if at[1] in ("over", 6):  # what is over is so for other ranks, too
        left = [each for found in run_ranks(3, load) for each in found]
        assert {epoch for epoch, _ in left} == set(range(at[0] + 1, 4))


@pytest.mark.parametrize("data", [Numbers, Stream])
@pytest.mark.parametrize("at", [(0, 0), (0, 12), (0, "over"), (1, "over"), (2, 3)])
def test_passes_without_epochs_go_on_where_they_were(data, at, tmp_path) -> None:
    def fn(rank):
        through = save_at(at, data, tmp_path, sets_epoch=False)
        passes = range(at[0] + (at[1] == "over"), 4)
        return through, read(loaded(data, tmp_path), passes, sets_epoch=False)

    for through, resumed in run_ranks(1, fn):
        assert resumed == through


def test_an_epoch_left_early_counts_in_no_other(tmp_path) -> None:
    def fn(rank):
        engine, loader = make(Numbers())
        batches(loader, [0], stop=2)
        loader.sampler.set_epoch(1)
        engine.save_checkpoint(tmp_path)
        assert read(loaded(Numbers, tmp_path), [1]) == read(loader, [1])

    run_ranks(2, fn)


@pytest.mark.parametrize("data", [Numbers, Stream])
def test_a_look_at_one_batch_keeps_the_position(data, tmp_path) -> None:
    def fn(rank):
        left = [b for p, b in save_at((0, 1), data, tmp_path, sets_epoch=False) if p == 0]
        loader = loaded(data, tmp_path)
        assert next(iter(loader)).tolist() == left[0]
        assert [b.tolist() for b in loader] == left
        assert len([b.tolist() for b in loader]) == len(left) + 2

    run_ranks(2, fn)


@pytest.mark.parametrize("data", [Numbers, Stream, Tracking])
def test_rolled_back_in_a_pass(data, tmp_path) -> None:
    def fn(rank):
        engine, loader = make(data())
        found = []
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == 2:
                engine.save_checkpoint(tmp_path, "before")
            if len(found) == 4:
                engine.load_checkpoint(tmp_path, "before")
            if len(found) == 5:
                engine.save_checkpoint(tmp_path, "after")
        assert found[4:6] == found[2:4]
        assert [b.tolist() for b in loaded(data, tmp_path)] == found[5:]
        whole = make(data())[1]
        assert [b.tolist() for b in whole] == found[:2] + found[4:]

    run_ranks(2, fn)


class Divided(IterableDataset):
    """Each rank reads every n-th sample, or a piece of its own."""

    pieces = False

    def __iter__(self):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = torch.arange(24)
        return iter(whole.chunk(ranks)[rank] if self.pieces else whole[rank::ranks])


class DividedPieces(Divided):
    pieces = True


class Positioned(Divided):
    """One with a position of its own."""

    at = 0

    def __iter__(self):
        for sample in list(super().__iter__())[self.at :]:
            self.at += 1
            yield sample

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("data", [Divided, DividedPieces, Positioned])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [((2, 2), (2, 3), None), ((2, 3), (2, 2), None), ((2, 2), (1, 2), 8), ((1, 2), (3, 2), 4)],
)
def test_iterable_data_on_other_ranks_and_batches(data, before, after, told, tmp_path, caplog):
    def save(rank):
        engine, loader = make(data(), micro=before[1])
        first = batches(loader, [0], stop=2)
        engine.save_checkpoint(tmp_path)
        return [x for _, batch, _ in first for x in batch]

    def load(rank):
        loader = loaded(data, tmp_path, micro=after[1])
        rest = [x for batch in loader for x in batch.tolist()]
        return rest, [r.getMessage() for r in caplog.records if "samples" in r.getMessage()]

    seen = {x for each in run_ranks(before[0], save) for x in each}
    results = run_ranks(after[0], load)
    rest = [x for each, _ in results for x in each]
    texts = [text for _, each in results for text in each]
    twice, lost = seen & set(rest), set(range(24)) - seen - set(rest)
    assert len(rest) == len(set(rest))
    assert len(texts) == (told is not None)
    if told is None:
        assert not twice
        assert not lost
    elif data is Positioned:
        assert not lost
        assert len(twice) == told
        assert f"{told} samples are read twice" in texts[0]
    else:
        assert len(lost) <= told
        assert len(twice) <= told
        assert f"up to {told} samples are read twice and as many left out" in texts[0]
        if data is Divided:
            assert not lost
            assert len(twice) == told % after[0]


def test_data_of_another_kind_is_refused(tmp_path) -> None:
    def fn(rank):
        engine, loader = make(Stream())
        batches(loader, [0], stop=2)
        engine.save_checkpoint(tmp_path, "stream")
        engine, loader = make(Tracking())
        engine.save_checkpoint(tmp_path, "own")
        engine, loader = make(Numbers())
        texts = [outcome(lambda: engine.load_checkpoint(tmp_path, "stream"))]
        assert len(list(loader)) == 7
        engine.save_checkpoint(tmp_path, "numbers")
        engine, loader = make(Stream())
        texts += [
            outcome(lambda t=t: engine.load_checkpoint(tmp_path, t)) for t in ("numbers", "own")
        ]
        return texts

    for texts in run_ranks(2, fn):
        assert "whose length is none, as of iterable ones, here it is" in texts[0]
        assert "here it is none, as of iterable ones: train on" in texts[1]
        assert "the dataset here has no state_dict" in texts[2]
