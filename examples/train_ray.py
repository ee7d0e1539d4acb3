"""Train under Ray Train: Ray starts the ranks, keeps the checkpoints and starts again from the newest one.

    pip install "ray[train]"
    python examples/train_ray.py --workers 2 --out /shared/run --storage /shared/ray

Ray has made the process group before `train` runs, and `torchloom.initialize` takes it: no
`ray.train.torch.prepare_model`, which would wrap the model for DDP. `--out` is one folder that all nodes see, as
all ranks write into one checkpoint; rank 0 reports it, and Ray copies it into `--storage`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchloom

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    # The default threshold, 100 000 elements, would leave so small a model whole.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "checkpoint": {"keep_last": 1},  # Ray keeps the older ones
    "steps_per_print": float("inf"),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 16, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def train(options: dict[str, Any]) -> None:
    """Train on one rank; Ray calls this in each worker."""
    import ray.train  # pyrefly: ignore[missing-import]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    engine, *_ = torchloom.initialize(model=model, config=CONFIG)
    engine.compile(backend=options["backend"])
    reported = ray.train.get_checkpoint()
    if reported is not None:
        with reported.as_directory() as folder:
            engine.load_checkpoint(folder)
    print(f"rank {engine.rank} is process {os.getpid()}, at step {engine.global_steps}", flush=True)
    while engine.global_steps < options["steps"]:
        inputs, targets = batch(engine.global_steps, engine.rank)
        outputs = engine(inputs.to(engine.device))
        loss = nn.functional.mse_loss(outputs, targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        metrics = {"step": engine.global_steps, "loss": loss.item()}
        if engine.rank == 0:
            print(f"step {metrics['step']} loss {metrics['loss']!r}", flush=True)
        if engine.global_steps % options["save_every"] == 0:
            engine.save_checkpoint(options["out"])
            saved = ray.train.Checkpoint.from_directory(options["out"])
            # All ranks report, equally often; one of them brings the files.
            ray.train.report(metrics, checkpoint=saved if engine.rank == 0 else None)
    engine.destroy()


def main() -> None:
    from ray.train import (  # pyrefly: ignore[missing-import]
        FailureConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.torch import TorchTrainer  # pyrefly: ignore[missing-import]

    options = parse()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=RunConfig(
            name="torchloom",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    result = trainer.fit()
    print(f"ended with {result.metrics}, checkpoint {result.checkpoint.path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model under Ray Train.")
    add = parser.add_argument
    add("--workers", type=int, default=2, help="ranks")
    add("--steps", type=int, default=20, help="optimizer steps of the whole run")
    add("--save-every", type=int, default=5, help="steps between checkpoints")
    add("--backend", default="aot_eager", help="inductor compiles longer and runs faster")
    temporary = Path(tempfile.gettempdir())
    add("--out", default=str(temporary / "torchloom-ray"), help="folder that all nodes see")
    add("--storage", default=str(temporary / "ray-results"), help="where Ray keeps checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main()
