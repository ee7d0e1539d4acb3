"""The no-communication limit: independent replicas that run at the same time and never talk."""

from __future__ import annotations

import torch

from peers.base import Job, Trainee, make_optimizer, make_step


def build(job: Job, *, compiled: bool, kernels: bool = False) -> Trainee:
    """Build one replica; with `kernels` its products run on the fastest implementation."""
    model = job.model()
    optimizer = make_optimizer(model)
    if kernels:
        woven = torch.compile(model, backend="torchloom", options={"choose_kernels": True})
        return Trainee(step=make_step(job, woven, optimizer))
    return Trainee(step=make_step(job, torch.compile(model) if compiled else model, optimizer))
