"""DistributedDataParallel with its default buckets; gradients are views of the buckets."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from arms.base import Job, Trainee, join_group, make_optimizer, make_step


def build(job: Job, *, compiled: bool) -> Trainee:
    """Build one rank; compiled, Dynamo splits the graph where the buckets end."""
    join_group()
    model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    trained = torch.compile(model) if compiled else model
    return Trainee(step=make_step(job, trained, optimizer, model.no_sync))
