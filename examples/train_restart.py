"""Resume, after a crash or on another number of ranks: each start goes on from the newest checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 2 examples/train_restart.py --out runs/a
    kill -9 PID    # of a rank, as printed at its start: torchrun starts all ranks again, losses stay the same
    torchrun --nproc-per-node 3 examples/train_restart.py --out runs/a --steps 80    # goes on, on three ranks
    torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 ... examples/train_restart.py --out /shared/runs/a --backend inductor

Prints the mean loss of each step. What makes a restart exact: samples follow from the step alone, and a checkpoint holds
weights, optimizer states, the schedule and the generators of random numbers. The ranks share a batch of 48 samples, so
losses on 1, 2, 3, 4, 6, 8 or 16 ranks differ by rounding alone. `--out` is a folder that all ranks see.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchloom

CONFIG = {
    "train_batch_size": 48,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
    # The default threshold, 100 000 elements, would leave so small a model whole.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "checkpoint": {"keep_last": 2},
    "steps_per_print": float("inf"),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(48, 16, generator=generator)[rank::num_ranks]
    return inputs, inputs.sin().sum(1, keepdim=True)


def main() -> None:
    options = parse()
    engine, *_ = torchloom.initialize(model=make_model(), config=CONFIG)
    engine.compile(backend=options.backend)
    if (Path(options.out) / "latest").exists():  # the whole rule: a first start has nothing to load
        engine.load_checkpoint(options.out)
    print(f"rank {engine.rank} is process {os.getpid()}, at step {engine.global_steps}", flush=True)
    while engine.global_steps < options.steps:
        inputs, targets = batch(engine.global_steps, engine.rank, engine.world_size)
        outputs = engine(inputs.to(engine.device))
        loss = nn.functional.mse_loss(outputs, targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = torchloom.all_reduce(loss.detach(), name="loss").item()
        if engine.rank == 0:
            print(f"step {engine.global_steps} loss {mean!r}", flush=True)
        if engine.global_steps % options.save_every == 0:
            engine.save_checkpoint(options.out)
    engine.destroy()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, and go on from the newest checkpoint.")
    add = parser.add_argument
    add("--steps", type=int, default=60, help="optimizer steps of the whole run")
    add("--save-every", type=int, default=5, help="steps between checkpoints")
    add("--backend", default="aot_eager", help="inductor compiles longer and runs faster")
    add("--out", default=str(Path(tempfile.gettempdir()) / "torchloom-restart"), help="folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
