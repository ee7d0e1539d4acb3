"""A data loader over this rank's part of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchloom.config import Config
from torchloom.engine.groups import World


def make_loader(
    dataset: Any, config: Config, world: World, collate_fn: Callable[..., Any] | None
) -> DataLoader[Any] | None:
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
        sampler = DistributedSampler(
            dataset,
            num_replicas=world.world_size,
            rank=world.rank,
            seed=config.seed or 0,
            drop_last=config.dataloader_drop_last,
        )
    return DataLoader(
        dataset,
        batch_size=config.batch.micro_batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        pin_memory=world.device.type == "cuda",
    )
