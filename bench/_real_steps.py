"""Steps of real ranks of this machine beside the simulation of the same steps, from a table calibrated in the same round.

    round: `torchloom calibrate` with the ranks -> table -> simulate | the ranks train | ...

Operators are timed by the thread's own clock, so of the steps only those count that had their cores for themselves. Where
others load the machine, the CPU time of a rank in a step is what can be compared: it lacks the waits for the other ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _clock import read_clocks, wait_until_quiet
from _environment import worker_environment
from _ranks import ask_ranks
from _stats import StepSample, clean, merge_ranks

SMALL = {
    "vocab_size": 2048,
    "dim": 256,
    "num_layers": 6,
    "num_heads": 4,
    "hidden_dim": 704,
    "max_seq_len": 256,
}
STEPS: tuple[dict[str, Any], ...] = (
    {"ranks": 2, "batch": 4, "shape": SMALL},
    {"ranks": 3, "batch": 4, "shape": SMALL},
)
ROUNDS, WARM, TIMED = 5, 4, 12
_ENOUGH = 4
"""Undisturbed steps that a round's median takes."""
_CACHE = Path(tempfile.gettempdir()) / "torchloom-bench-simulate"


def compare_steps(case: dict[str, Any], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return measured and simulated seconds of a case's step, round by round.

    Args:
        case: one of `STEPS`.
        rounds: how many, each with a table of its own.
    """
    found = [_round(case, number) for number in range(rounds)]
    simulated_ms = 1e3 * statistics.median(each["simulated_s"] for each in found)
    ratios = {
        "steps": [e["simulated_s"] / e["measured_s"] for e in found if e["measured_s"]],
        "CPU time of a rank": [e["simulated_s"] / e["cpu_s"] for e in found],
    }
    print(f"{case['ranks']} gloo ranks, simulated {simulated_ms:,.0f} ms", flush=True)
    for what, values in ratios.items():
        if not values:
            print(f"  {what}: fewer than {_ENOUGH} in each round had their cores")
            continue
        spread = f"{min(values):.2f}-{max(values):.2f} in {len(values)} rounds"
        print(f"  to {what}: {statistics.median(values):.2f}x ({spread})", flush=True)
    return {**case, "rounds": found, "ratios": ratios}


def _round(case: dict[str, Any], number: int) -> dict[str, Any]:
    table = _CACHE / f"{case['ranks']}-ranks-{number}.json"
    _CACHE.mkdir(parents=True, exist_ok=True)
    wait_until_quiet(10.0)
    command = ["calibrate", "--nproc", str(case["ranks"]), "--out", str(table)]
    environment = {**os.environ, **worker_environment(_CACHE)}
    subprocess.run(
        [sys.executable, "-m", "torchloom", *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    said = json.dumps({**case, "table": str(table)})
    script = str(Path(__file__))
    measured = ask_ranks(script, ["train", said], ranks=case["ranks"], cache=_CACHE, timeout_s=900)
    (simulated,) = ask_ranks(script, ["simulate", said], ranks=1, cache=_CACHE, timeout_s=300)
    cores = os.cpu_count() or 1
    steps = [
        merge_ranks("real", number, ranks, cores)
        for ranks in zip(*(each["steps"] for each in measured), strict=True)
    ]
    undisturbed = clean(steps, "real")
    return {
        "measured_s": _median_s(undisturbed) if len(undisturbed) >= _ENOUGH else None,
        "simulated_s": simulated["step_s"],
        "simulated": simulated,
        "cpu_s": statistics.median(cpu for each in measured for cpu in each["cpu_s"]),
        "clean_steps": len(undisturbed),
    }


def _median_s(steps: list[StepSample]) -> float:
    return statistics.median(each.wall_s for each in steps)


def _model(case: dict[str, Any]) -> Any:
    from torchloom.recipes.train.model import Llama, LlamaConfig

    return Llama(LlamaConfig(**case["shape"]))


def _config(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case["batch"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }


def _train(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import torchloom

    engine, *_ = torchloom.initialize(model=_model(case), config=_config(case))
    engine.compile()
    ids = torch.randint(
        0, case["shape"]["vocab_size"], (case["batch"], case["shape"]["max_seq_len"])
    )
    steps, cpu_s = [], []
    for number in range(WARM + TIMED):
        dist.barrier()
        before = read_clocks()
        engine.backward(engine(ids, ids))
        engine.step()
        dist.barrier()  # the slowest rank's step counts
        taken = read_clocks().since(before)
        if number >= WARM:
            steps.append(dataclasses.asdict(taken))
            cpu_s.append(taken.cpu_s)
    return {"steps": steps, "cpu_s": cpu_s}


def _simulate(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    from torchloom.costs import load_table
    from torchloom.simulation import simulate

    ids = torch.zeros(case["batch"], case["shape"]["max_seq_len"], dtype=torch.long, device="meta")
    found = simulate(
        lambda: _model(case),
        (ids, ids),
        _config(case),
        world_size=case["ranks"],
        costs=load_table(path=Path(case["table"])),
    ).to_dict()
    del found["plan"]
    return found


if __name__ == "__main__":
    print(
        json.dumps({"train": _train, "simulate": _simulate}[sys.argv[1]](json.loads(sys.argv[2])))
    )
