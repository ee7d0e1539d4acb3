"""One rank of the soak: a small model, saved often, gone on with wherever it was ended.

    python -m torch.distributed.run ... worker.py '{"folder": ..., "steps": 1000, ...}'

Everything that random numbers decide in the training comes from generators that a checkpoint keeps:
the order of the data, dropout. What the soak itself draws (pauses) comes from another one.

It leaves in its folder:

    progress          process id and step of rank 0, for whoever wants to disturb it
    facts-<rank>      a line of JSON every few steps: memory, descriptors, threads
    final-<rank>.pt   at the end: weights, this rank's moments, schedule, generator
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchloom

VOCAB, DIM, SAMPLES, LENGTH = 64, 32, 200, 12
FACTS_EVERY = 10
_PAUSE_CHANCE, _PAUSE_S = 0.03, 0.03
_LONG_CHANCE, _LONG_S = 0.002, 1.6
"""Longer than the second after which a waiting rank asks where the others are."""
_KEEP = 3


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a rank is asked to do; see `run.py`."""

    folder: str
    steps: int
    save_every: int
    seed: int
    pauses: bool
    backend: str
    """Of `engine.compile`; empty: eager."""


class Net(nn.Module):
    """Layers with dropout, and one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
            )
            for _ in range(3)
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


class Log:
    """Where this rank is, for the driver; facts of this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._place = os.open(folder / "progress", os.O_CREAT | os.O_WRONLY) if rank == 0 else None
        self._facts = (folder / f"facts-{rank}").open("a", buffering=1)

    def step(self, step: int, *, is_start: bool = False) -> None:
        """Note a step that has been taken, or the one from which this process goes on."""
        if self._place is not None:
            os.pwrite(self._place, f"{os.getpid():10d} {step:10d}".encode(), 0)
        if is_start or step % FACTS_EVERY == 0:
            self._facts.write(json.dumps({"step": step, "start": is_start, **own_facts()}) + "\n")


def own_facts() -> dict[str, int]:
    """Return what this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "pid": os.getpid(),
        "rss_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
    }


def main(spec: Spec) -> None:
    """Train from the newest checkpoint to the last step."""
    torch.set_num_threads(1)
    folder = Path(spec.folder)
    torch.manual_seed(spec.seed)
    model, data = Net(), torch.randint(0, VOCAB, (SAMPLES, LENGTH))
    engine, _, loader, schedule = torchloom.initialize(
        model=model, training_data=data, config=_config(spec)
    )
    if spec.backend:
        engine.compile(backend=spec.backend)
    torch.manual_seed(1000 + spec.seed + engine.rank)  # dropout differs between ranks
    log, checkpoints = Log(folder, engine.rank), folder / "checkpoints"
    if _has_saved(checkpoints):
        engine.load_checkpoint(checkpoints)
    log.step(engine.global_steps, is_start=True)
    pauses = random.Random(f"{spec.seed} {engine.rank} {engine.global_steps}")
    batches = _batches(loader)
    while engine.global_steps < spec.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(next(batches)))
            engine.step()
        step = engine.global_steps
        log.step(step)
        if step % spec.save_every == 0 and step < spec.steps:
            _save(engine, checkpoints, step // spec.save_every)
        if spec.pauses:
            _pause(pauses)
    engine.save_checkpoint(checkpoints, keep_last=_KEEP)
    final = {
        "weights": engine.module.state_dict(),
        "moments": _moments(engine),
        "schedule": repr(schedule.state_dict()),
        "generator": torch.get_rng_state(),
    }
    torch.save(final, folder / f"final-{engine.rank}.pt")
    engine.destroy()
    torch.distributed.destroy_process_group()


def _config(spec: Spec) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "seed": spec.seed,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.05}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": spec.steps + 1,
                "warmup_num_steps": spec.steps // 10,
                "warmup_max_lr": 3e-3,
            },
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }


def _has_saved(checkpoints: Path) -> bool:
    """Say whether any checkpoint was ever complete: then a failure to load one is an error."""
    if not checkpoints.is_dir():
        return False
    return any((path / "manifest.json").exists() for path in checkpoints.glob("[!.]*"))


def _save(engine: Any, checkpoints: Path, number: int) -> None:
    """Save in one of three ways, in turn: a new tag, a new one in the background, one replaced."""
    tag = "again" if number % 3 == 2 else None
    engine.save_checkpoint(checkpoints, tag, keep_last=_KEEP, async_save=number % 3 == 1)


def _batches(loader: Any) -> Iterator[Tensor]:
    epoch = loader.sampler.epoch
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _pause(source: random.Random) -> None:
    drawn = source.random()
    if drawn < _LONG_CHANCE:
        time.sleep(_LONG_S)
    elif drawn < _LONG_CHANCE + _PAUSE_CHANCE:
        time.sleep(2 * _PAUSE_S * source.random())


def _moments(engine: Any) -> dict[str, Tensor]:
    state = engine.optimizer.state_dict()["state"]
    return {
        f"{index} {name}": torch.as_tensor(value)
        for index, held in state.items()
        for name, value in held.items()
    }


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])))
