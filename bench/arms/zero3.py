"""DeepSpeed ZeRO-3, eager or compiled. Clipping is off: its default of 1.0 would change the losses."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from arms.base import Job, Trainee, UnavailableError, make_optimizer

_BUCKET_NUMEL = 5_000_000  # holds the largest parameter; the default would reserve 2 GB


def build(job: Job, *, compiled: bool) -> Trainee:
    """Build one rank of the DeepSpeed engine.

    Raises:
        UnavailableError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise UnavailableError(f"DeepSpeed is not installed ({error})") from error
    deepspeed.init_distributed(dist_backend="gloo")
    model = job.model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config=_config(job)
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for micro in job.micro_batches(tokens, targets):
            loss = engine(*micro)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Trainee(step=step, compile=engine.compile if compiled else lambda: None)


def _config(job: Job) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": _BUCKET_NUMEL},
    }
