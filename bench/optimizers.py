"""Step time of optimizers that see whole parameters beside AdamW's: eight layers at stage 3, two ranks.

    python bench/optimizers.py                  AdamW, Muon on owners, and Muon on every rank (stage 0)
    python bench/optimizers.py --dim 512

Each figure is the median of the time from `optimizer.step()` to its end, gradients given. At the sizes of a CPU the products of
Newton-Schulz are most of it: owners divide them, stage 0 repeats them on every rank. Writes `optimizers.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _environment import snapshot, worker_environment
from _ranks import ask_ranks

_HERE = Path(__file__).parent
RANKS, LAYERS = 2, 8
ARMS = {"AdamW, shards": ("AdamW", 3), "Muon, owners": ("Muon", 3), "Muon, every rank": ("Muon", 0)}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=_HERE / "out")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(_work(options.dim, options.steps)))
        return 0
    given = ["--worker", "--dim", str(options.dim), "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        found = ask_ranks(__file__, given, ranks=RANKS, cache=Path(cache), timeout_s=1200)
    environment = worker_environment(_HERE)
    shape = {"dim": options.dim, "layers": LAYERS, "ranks": RANKS, "steps": options.steps}
    record = {"environment": snapshot(shape, environment), "ranks": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "optimizers.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ARMS:
        slowest = max(each[name]["step_ms"] for each in found)
        held = max(each[name]["state_mb"] for each in found)
        print(f"{name:18} {slowest:9.1f} ms a step, {held:7.1f} MB of states on the fullest rank")
    return 0


def _work(dim: int, num_steps: int) -> dict[str, Any]:
    """Time each arm on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import torchloom

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = {"q": (dim, dim), "k": (dim, dim // 4), "v": (dim, dim // 4), "o": (dim, dim)}
            kinds |= {"gate": (dim, 3 * dim), "up": (dim, 3 * dim), "down": (3 * dim, dim)}
            for name, sizes in kinds.items():
                self.add_module(name, nn.Linear(*sizes, bias=False))

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, (kind, stage) in ARMS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        torchloom.shard_model(model, stage, persistence_threshold=0)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
        times = []
        for step in range(num_steps + 2):
            for param in model.parameters():
                param.grad = torchloom.shard.local_shard(param).clone()
            dist.barrier()
            started = time.perf_counter()
            optimizer.step()
            if step > 1:
                times.append(time.perf_counter() - started)
        held = [value for state in optimizer.state.values() for value in state.values()]
        size = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
        found[name] = {"step_ms": 1e3 * statistics.median(times), "state_mb": size / 1e6}
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
