"""The no-communication limit: independent replicas that run at the same time and never talk."""

from __future__ import annotations

import torch

from arms.base import Job, Trainee, make_optimizer, make_step


def build(job: Job, *, compiled: bool) -> Trainee:
    """Build one replica."""
    model = job.model()
    optimizer = make_optimizer(model)
    return Trainee(step=make_step(job, torch.compile(model) if compiled else model, optimizer))
