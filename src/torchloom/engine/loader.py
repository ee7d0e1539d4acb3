"""A data loader over this rank's part of a dataset that can save and restore its position.

The position is (epoch, number of samples that this rank has handed out). The loader counts a batch when
it hands it out, and skips as many indices of the same order when it continues, so it reads no sample
twice. A checkpoint keeps the position.

    loaded in the middle    the next pass begins there; a running pass jumps there
    loaded at an end        after set_epoch of the same epoch the next pass is empty, as it was read already;
                            without set_epoch the next pass is a whole one
    another epoch           begins at its first sample
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchloom.config import Config
from torchloom.errors import CheckpointError
from torchloom.launch.groups import World
from torchloom.log import get_logger

logger = get_logger(__name__)


@dataclass
class LoaderPosition:
    """Where a rank is in its data."""

    epoch: int = 0
    """In which the samples were counted."""
    samples: int = 0
    """Of this rank, handed out in the epoch."""
    is_over: bool = False
    """The last pass over the epoch has come to its end."""
    begin: int = 0
    """Samples that the next pass leaves out."""
    is_read: bool = False
    """The loaded position was the end of the epoch: after `set_epoch` of it a pass is empty."""

    def enter(self, epoch: int) -> None:
        """Move to the first sample of an epoch."""
        self.epoch, self.samples, self.is_over = epoch, 0, False
        self.move_on()

    def move_on(self) -> None:
        """Let the next pass be a whole one."""
        self.begin, self.is_read = 0, False


class Sampler(DistributedSampler[Any]):
    """A shuffled order, divided between ranks, that can begin in its middle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = LoaderPosition()

    def __iter__(self) -> Iterator[Any]:
        """Return the indices of this rank that are left of the epoch."""
        return itertools.islice(super().__iter__(), self.position.begin, None)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; another one than the present begins at its beginning."""
        if epoch != self.epoch:
            self.position.enter(epoch)
        elif self.position.is_read:
            self.position.begin = len(self)
        super().set_epoch(epoch)


class Rest(IterableDataset[Any]):
    """An iterable dataset without its first samples, which are read and dropped."""

    def __init__(self, dataset: Any, begin: int) -> None:
        self._dataset, self._begin = dataset, begin

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what is left."""
        return itertools.islice(iter(self._dataset), self._begin, None)


class Loader(DataLoader[Any]):
    """torch's loader with a position. It is one, as programs ask for its attributes and its class.

    Args:
        dataset: a torch dataset.
        world: this rank among its peers.
        rest: what torch's loader takes.
    """

    _num_loads = 0
    """A pass that began before the last load goes on where that has put it."""
    _drops = True
    """A pass drops samples up to the position: no dataset that has one of its own is there already."""

    def __init__(self, dataset: Any, *, world: World, **rest: Any) -> None:
        super().__init__(dataset, **rest)
        self._world = world
        self._own_sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        self._position = self._own_sampler.position if self._own_sampler else LoaderPosition()

    def __iter__(self) -> Any:
        """Iterate over micro-batches; the first pass after a load goes on where the saved one was."""
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        num_loads = None
        while num_loads != self._num_loads:
            num_loads = self._num_loads
            yield from self._pass(num_loads)

    def _pass(self, num_loads: int) -> Iterator[Any]:
        """Yield the batches that are left of the epoch, until there are none or another load."""
        at, size, sampler = self._position, self.batch_size or 1, self._own_sampler
        epoch, samples = self._epoch, at.begin
        for batch in self._rest():
            samples += size if sampler is None else max(0, min(size, len(sampler) - samples))
            at.epoch, at.samples, at.is_over = epoch, samples, False
            yield batch
            if self._num_loads != num_loads:
                self._stay_in(epoch)
                return
            at.move_on()  # only here: a loop that breaks after one batch stays in this epoch
        at.enter(self._epoch)
        at.is_over = epoch == self._epoch

    def _stay_in(self, epoch: int) -> None:
        """Choose where a pass over `epoch` goes on after a load of another epoch."""
        sampler, loaded = self._own_sampler, self._epoch
        if sampler is None or loaded == epoch:
            return
        if self._position.is_read:
            sampler.set_epoch(epoch)
        if self._epoch != epoch or loaded != epoch - 1:
            self._warn(
                "a checkpoint of epoch %d was loaded in a pass over epoch %d, which goes on in epoch %d: "
                "begin the loop over epochs again at loader.sampler.epoch",
                loaded,
                epoch,
                self._epoch,
            )

    def _rest(self) -> Iterator[Any]:
        begin = self._position.begin
        if self._own_sampler is not None or not begin or not self._drops:
            return super().__iter__()
        rest: DataLoader[Any] = DataLoader(
            Rest(self.dataset, begin),
            batch_size=self.batch_size,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            pin_memory=self.pin_memory,
            generator=self.generator,
        )
        return iter(rest)

    @property
    def _epoch(self) -> int:
        return 0 if self._own_sampler is None else self._own_sampler.epoch

    @property
    def _has_stateful_dataset(self) -> bool:
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and that of a dataset that has one of its own."""
        at = self._position
        state: dict[str, Any] = {
            "epoch": at.epoch,
            "samples": at.samples,
            "over": at.is_over,
            "ranks": self._world.world_size,
            **self._facts(),
        }
        if self._has_stateful_dataset:
            state["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, which another number of ranks may have saved; also in a running pass.

        Raises:
            CheckpointError: the position belongs to other data; nothing has changed.
        """
        self._check_same_data(state)
        seen, ranks = int(state["samples"]) * int(state["ranks"]), self._world.world_size
        is_own = self._own_sampler is None and "dataset" in state
        if is_own and ranks != int(state["ranks"]):
            self._warn(
                "the position that the dataset itself kept on %d ranks means nothing to %d: it stays "
                "where it is, and if that is its beginning %d samples are read twice; keep a position "
                "that any number of ranks can take in client_state",
                state["ranks"],
                ranks,
                seen,
            )
            return
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self._drops = not is_own
        self._go_to(int(state["epoch"]), self._share(seen, state), bool(state.get("over")))

    def _check_same_data(self, state: dict[str, Any]) -> None:
        way_out = "or leave the position out with load_module_only=True"
        for name, here in self._facts().items():
            if state[name] != here:
                raise CheckpointError(
                    f"the saved position is one in a dataset whose {name} is {_told(state[name])}, here it is "
                    f"{_told(here)}: train on the same data with the same seed, {way_out}"
                )
        if "dataset" in state and not self._has_stateful_dataset:
            raise CheckpointError(
                "the checkpoint holds a state of the dataset's own, and the dataset here has no "
                f"state_dict and load_state_dict: train on the same data, {way_out}"
            )

    def _facts(self) -> dict[str, Any]:
        """Return what says which samples come in which order; None of iterable datasets."""
        sampler: Any = self._own_sampler
        return {
            "length": None if sampler is None else len(sampler.dataset),
            "seed": None if sampler is None else sampler.seed,
        }

    def _share(self, seen: int, state: dict[str, Any]) -> int:
        """Return how many of the samples that all ranks have seen are this rank's."""
        ranks, sampler = self._world.world_size, self._own_sampler
        begin, again = divmod(seen, ranks)
        if sampler is not None and seen >= len(self.dataset):  # type: ignore[arg-type]
            return len(sampler)  # the order is filled up to a multiple of the ranks
        if sampler is None and seen and ranks != int(state["ranks"]):
            self._warn(
                "%d ranks have read %d samples of an iterable dataset, and each of %d ranks leaves its "
                "first %d out: where rank r reads samples r, r + %d and so on, %d are read twice and none "
                "is left out; where it is divided otherwise, up to %d samples are read twice and as many "
                "left out: load on %d ranks, or train on a map-style dataset",
                *(state["ranks"], seen, ranks, begin, ranks, again, seen, state["ranks"]),
            )
        elif again:
            self._warn(
                "%d samples of the epoch were read by %d ranks, which %d ranks cannot share evenly: "
                "%d of them are read twice",
                *(seen, state["ranks"], ranks, again),
            )
        return begin

    def _go_to(self, epoch: int, samples: int, is_over: bool) -> None:
        at, sampler = self._position, self._own_sampler
        if sampler is not None:
            sampler.set_epoch(epoch)
        at.epoch, at.samples, at.is_over = epoch, samples, is_over
        at.begin, at.is_read = (0, True) if is_over else (samples, False)
        self._num_loads += 1

    def _warn(self, text: str, *args: Any) -> None:
        if self._world.rank == 0:
            logger.warning(text, *args)


def _told(value: object) -> object:
    return "none, as of iterable ones" if value is None else value


def make_loader(
    dataset: Any, config: Config, world: World, collate_fn: Callable[..., Any] | None
) -> Loader | None:
    """Return a loader of micro-batches, or None without a dataset.

    Map-style datasets are shuffled and divided between ranks; call
    `loader.sampler.set_epoch(epoch)` for a new order. Iterable datasets divide themselves.

    Args:
        dataset: a torch dataset.
        config: gives micro-batch size, seed and whether an incomplete last batch is dropped.
        world: this rank among its peers.
        collate_fn: joins samples into a batch.
    """
    if dataset is None:
        return None
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = Sampler(
            dataset,
            num_replicas=world.world_size,
            rank=world.rank,
            seed=config.seed or 0,
            drop_last=config.dataloader_drop_last,
        )
    return Loader(
        dataset,
        world=world,
        batch_size=config.batch.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        pin_memory=world.device.type == "cuda",
        # A pass draws a seed for its workers; from torch's own generator, a pass that is begun again
        # after a load would change what training draws.
        generator=torch.Generator().manual_seed(config.seed or 0),
    )
