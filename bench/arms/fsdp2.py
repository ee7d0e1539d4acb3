"""FSDP2: `fully_shard` around each block and around the model."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from arms.activations import checkpoint_blocks
from arms.base import Job, Trainee, join_group, make_optimizer, make_step


def build(
    job: Job,
    *,
    compiled: Literal["none", "block", "whole"],
    checkpoint_every: int = 0,
    selective: bool = False,
) -> Trainee:
    """Build one rank: eager, each block compiled, or the model compiled after sharding.

    With `checkpoint_every` n, each n-th block keeps its input only and runs again in backward; with `selective` it
    also keeps the results of products and attention.
    """
    join_group()
    mesh = init_device_mesh("cpu", (job.world_size,))
    model = job.model()
    checkpoint_blocks(model, checkpoint_every, selective=selective)
    for block in model.blocks:
        if compiled == "block":
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    return Trainee(
        step=make_step(job, torch.compile(model) if compiled == "whole" else model, optimizer)
    )
