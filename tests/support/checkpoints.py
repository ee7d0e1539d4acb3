"""What tests of checkpoints share: saved runs, damage, states of an engine to compare."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom.errors import TorchloomError
from torchloom.shard import local_shard


def save_steps(root: Path, *steps: int, ranks: int = 2, stage: int = 3, **rest: Any) -> None:
    """Train and save after each of these steps."""

    def fn(rank):
        engine, _ = make_engine(stage, **rest)
        done = 0
        for step in steps:
            train(engine, rank, step - done, first=done)
            engine.save_checkpoint(root)
            done = step

    run_ranks(ranks, fn)


def state_of(engine: Any) -> dict[str, Any]:
    """Return all of an engine that a load may change, as hashes and numbers."""
    found: dict[str, Any] = {
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps],
        "scaler": engine.scaler.state_dict(),
        "torch": _hash(torch.get_rng_state()),
    }
    for name, tensor in [*engine.module.named_parameters(), *engine.module.named_buffers()]:
        found[f"model {name}"] = _hash(tensor)
        found[f"grad {name}"] = None if tensor.grad is None else _hash(tensor.grad)
    if engine.optimizer is not None:
        for each in engine.local:
            for key, value in engine.optimizer.state.get(each.param, {}).items():
                shown = _hash(value) if isinstance(value, torch.Tensor) else repr(value)
                found[f"optim {each.spec.name} {key}"] = shown
        found["groups"] = [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        ]
    if engine.lr_scheduler is not None:
        found["schedule"] = repr(engine.lr_scheduler.state_dict())
    return found


def outcome(action: Callable[[], Any]) -> str:
    """Return what an action came to: "done", or the error's class and text."""
    try:
        action()
    except TorchloomError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def load_all(
    cases: Iterable[Path], tag: str | None = None, ranks: int = 2, **options: Any
) -> list[list[tuple[str, bool]]]:
    """Load each case into one engine per rank; return what came of it, and whether it stayed."""

    def fn(rank):
        engine, _ = make_engine(3, seed=4)
        train(engine, rank, 1)
        found = []
        for root in cases:
            before = state_of(engine)
            text = outcome(lambda root=root: engine.load_checkpoint(root, tag, **options))
            found.append((text, state_of(engine) == before))
        return found

    return run_ranks(ranks, fn)


def copied(root: Path, target: Path) -> Path:
    """Copy a folder of checkpoints, to be damaged."""
    shutil.copytree(root, target)
    return target


def flip_bit(path: Path, position: float, bit: int = 3) -> None:
    """Flip one bit, at a place between 0 and 1 of the file."""
    content = bytearray(path.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= 1 << bit
    path.write_bytes(content)


def die_at(call: int, *places: tuple[Any, str]) -> None:
    """Kill this process at its n-th call of any of these functions from now on.

    Args:
        call: which one, from 1.
        places: owners and names of the functions.
    """
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return step

    for owner, name in places:
        setattr(owner, name, counted(getattr(owner, name)))


def leftovers(root: Path) -> list[str]:
    """Return names in a folder that belong to no finished checkpoint."""
    return [name for name in names_in(root) if name.startswith(".torchloom-")]


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    """Load exported weights, as readers of the format do."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def _hash(tensor: torch.Tensor) -> str:
    flat = local_shard(tensor).contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:12]
