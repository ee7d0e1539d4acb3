"""torchloom, stages 1 to 3, through its public API."""

from __future__ import annotations

from torch import Tensor

from peers.base import LEARNING_RATE, WEIGHT_DECAY, Job, Trainee, UnavailableError, join_group


def build(
    job: Job,
    *,
    stage: int,
    watched: bool = False,
    symmetric_memory: bool = False,
    kernels: bool = False,
) -> Trainee:
    """Build one rank of the torchloom engine; compiled as `engine.compile()` does by default.

    With `watched` all that it does is recorded, from its compile to its last step. With
    `symmetric_memory` the ranks communicate through shared memory; with `kernels` matrix products
    run on the fastest implementation.

    Raises:
        UnavailableError: torchloom cannot be imported, or has no `initialize` yet.
    """
    try:
        from torchloom import initialize
    except ImportError as error:
        raise UnavailableError(f"torchloom is not importable ({error})") from error
    join_group()
    if watched:
        from torchloom import watch

        watch().__enter__()
    engine, *_ = initialize(
        model=job.model(), config=_config(job, stage, symmetric_memory, kernels)
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainee(step=step, compile=engine.compile)


def _config(job: Job, stage: int, symmetric_memory: bool, kernels: bool) -> dict[str, object]:
    optimizer = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": stage},
        "compile": {"symmetric_memory": symmetric_memory, "choose_kernels": kernels},
    }
