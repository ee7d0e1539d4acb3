"""A data loader over this rank's part of a dataset, which can tell where it is and go on from there.

The position is (epoch, samples that this rank has handed out). It is counted when a batch is handed
out, and taken up by the order of indices, so going on reads nothing twice. A checkpoint keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchloom.config import Config
from torchloom.engine.groups import World
from torchloom.errors import CheckpointError
from torchloom.log import get_logger

logger = get_logger(__name__)


class Sampler(DistributedSampler[Any]):
    """A shuffled order, divided between ranks, that can begin in its middle."""

    begin = 0
    """Samples of this rank that the next pass leaves out."""

    def __iter__(self) -> Iterator[Any]:
        """Return the indices of this rank that are left of the epoch."""
        begin, self.begin = self.begin, 0
        return iter(list(super().__iter__())[begin:])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; another one than the present begins at its beginning."""
        if epoch != self.epoch:
            self.begin = 0
        super().set_epoch(epoch)


class Loader(DataLoader[Any]):
    """torch's loader with a position. It is one, as programs ask for its attributes and its class."""

    _handed_out = 0
    """Samples of this rank in the present pass."""

    def __iter__(self) -> Any:
        """Iterate over micro-batches; the first pass after a load goes on where the saved one was."""
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        size = self.batch_size or 1
        skip = 0
        if sampler is None:
            skip, self._begin = self._begin, 0
            self._handed_out = 0
        else:
            self._handed_out = sampler.begin
        for batch in super().__iter__():
            self._handed_out += size if sampler is None else min(size, self._left(sampler))
            if skip > 0:  # datasets without an order are read again up to the position
                skip -= size
                continue
            yield batch
        self._handed_out = 0

    _begin = 0
    """Samples that the next pass over an iterable dataset leaves out."""

    def _left(self, sampler: Sampler) -> int:
        return max(0, len(sampler) - self._handed_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and that of a dataset that has one of its own."""
        sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        waiting = self._begin if sampler is None else sampler.begin
        state: dict[str, Any] = {
            "epoch": 0 if sampler is None else sampler.epoch,
            "samples": waiting or self._handed_out,
            "ranks": 1 if sampler is None else sampler.num_replicas,
            "seed": None if sampler is None else sampler.seed,
            "length": None if sampler is None else len(self.dataset),  # type: ignore[arg-type]
        }
        if hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position, also one of another number of ranks; the next pass begins there.

        Raises:
            CheckpointError: the position is one in other data.
        """
        self._handed_out = 0
        sampler = self.sampler if isinstance(self.sampler, Sampler) else None
        if sampler is None:
            if "dataset" in state:
                self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
            else:
                self._begin = int(state["samples"])
            return
        for name, have in (("seed", sampler.seed), ("length", len(self.dataset))):  # type: ignore[arg-type]
            if state[name] != have:
                raise CheckpointError(
                    f"the saved position is one in a dataset whose {name} is {state[name]}, here it is "
                    f"{have}: train on the same data with the same seed, or leave the position out "
                    "with load_module_only=True"
                )
        seen = int(state["samples"]) * int(state["ranks"])
        if seen % sampler.num_replicas:
            logger.warning(
                "%d samples of the epoch were read by %d ranks, which %d ranks cannot share evenly: "
                "up to %d of them are read again",
                seen,
                state["ranks"],
                sampler.num_replicas,
                seen % sampler.num_replicas,
            )
        sampler.set_epoch(int(state["epoch"]))
        sampler.begin = seen // sampler.num_replicas


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
        batch_size=config.batch.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        pin_memory=world.device.type == "cuda",
        # A pass draws a seed for its workers; from torch's own generator, a pass that is begun again
        # after a load would change what training draws.
        generator=torch.Generator().manual_seed(config.seed or 0),
    )
