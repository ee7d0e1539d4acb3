"""The data goes on where it was: in the middle of an epoch, in the same order, nothing twice."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

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
        return iter(torch.arange(40))


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


def test_it_is_a_data_loader() -> None:
    def fn(rank):
        _, loader = make(Numbers())
        assert isinstance(loader, DataLoader)
        assert len(loader) == 7
        before = torch.get_rng_state()
        list(loader)
        assert torch.equal(before, torch.get_rng_state())

    run_ranks(2, fn)
