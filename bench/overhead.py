"""Python per step: what a training library adds to a model whose compute takes no time.

    python bench/overhead.py
    python bench/overhead.py --arms plain,loom-3 --rounds 9

Two linear layers of 8 features, `aot_eager`, two gloo ranks, one thread. Each arm is a fresh pair of processes; rounds are
interleaved. Figures are CPU microseconds of the thread that runs the loop, medians over its steps: time in which it
waits for the other rank does not count. Writes `overhead.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _environment import snapshot, worker_environment
from _ranks import ask_ranks

_HERE = Path(__file__).parent
RANKS = 2
PHASES = ("forward", "backward", "step")
ARMS = ("plain", "fsdp2", "loom-0", "loom-3")
LABELS = {
    "plain": "torch.compile, no communication",
    "fsdp2": "FSDP2 and torch.compile",
    "loom-0": "torchloom stage 0",
    "loom-3": "torchloom stage 3",
}
BATCH, WIDTH = 4, 8
_WARM_UP = 50


class Loop(NamedTuple):
    """The three calls of a training loop."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    step: Callable[[], Any]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    if options.worker:
        return _work(json.loads(options.worker))
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in options.arms}
    for _ in range(options.rounds):
        for arm in options.arms:
            spec = json.dumps({"arm": arm, "steps": options.steps})
            found, *_ = ask_ranks(
                __file__,
                ["--worker", spec],
                ranks=RANKS,
                cache=_HERE.parent / ".cache" / "bench",
                timeout_s=300,
                quiet=True,
            )
            rounds[arm].append(found)
    environment = worker_environment(_HERE)
    record = {"environment": snapshot({"ranks": RANKS}, environment), "rounds": rounds}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.json").write_text(json.dumps(record, indent=1) + "\n")
    _tell(rounds)
    return 0


def _tell(rounds: dict[str, list[dict[str, float]]]) -> None:
    sums = {}
    for arm, found in rounds.items():
        medians = [statistics.median(each[phase] for each in found) for phase in PHASES]
        sums[arm] = sum(medians)
        every = sorted(sum(each[phase] for phase in PHASES) for each in found)
        text = " / ".join(f"{value:.0f}" for value in medians)
        print(
            f"{LABELS[arm]:34} {text} us, together {sums[arm]:.0f} [{every[0]:.0f}-{every[-1]:.0f}]"
        )
    if "plain" in sums:
        for arm in sums.keys() - {"plain"}:
            print(f"{LABELS[arm]} adds {sums[arm] - sums['plain']:.0f} us to a step")


def _work(spec: dict[str, Any]) -> int:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    x = torch.randn(BATCH, WIDTH)
    make = _loom if spec["arm"].startswith("loom") else _torch
    loop = make(spec["arm"], x)
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for step in range(_WARM_UP + spec["steps"]):
        begun = time.thread_time()
        loss = loop.forward()
        ahead = time.thread_time()
        loop.backward(loss)
        behind = time.thread_time()
        loop.step()
        ended = time.thread_time()
        if step >= _WARM_UP:
            for phase, seconds in zip(
                PHASES, (ahead - begun, behind - ahead, ended - behind), strict=True
            ):
                times[phase].append(1e6 * seconds)
    print(json.dumps({phase: statistics.median(found) for phase, found in times.items()}))
    torch.distributed.destroy_process_group()
    return 0


def _model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _torch(arm: str, x: Any) -> Loop:
    import torch

    model = _model()
    if arm == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Loop(lambda: compiled(x).square().mean(), lambda loss: loss.backward(), step)


def _loom(arm: str, x: Any) -> Loop:
    import torchloom

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": int(arm[-1]), "stage3_param_persistence_threshold": 0},
        "steps_per_print": float("inf"),
    }
    engine, *_ = torchloom.initialize(model=_model(), config=config)
    engine.compile(backend="aot_eager")
    return Loop(lambda: engine(x).square().mean(), engine.backward, engine.step)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/overhead.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=_HERE / "out", help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
