"""How far simulated training steps are from published ones, and what a simulation costs.

    python bench/simulate.py                 all runs, overlap at real sizes, cost; about ten minutes of one core
    python bench/simulate.py --only costs    one part: published, overlap or costs

Each simulation is a process of its own. No GPU is needed. Writes `simulate.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _environment import snapshot
from _published import RUNS, Published

_PARTS = "published", "overlap", "costs"
_LARGE = {"device": "h100-80gb", "network": "nvlink+ib400"}
OVERLAP: tuple[dict[str, Any], ...] = (
    {"model": "llama-8b", "ranks": 8, "seq_len": 8192, "micro_batch": 2, **_LARGE},
    {"model": "llama-70b", "ranks": 512, "seq_len": 4096, "micro_batch": 1, **_LARGE},
)
COSTS: tuple[dict[str, Any], ...] = (
    {"model": "llama-70b", "ranks": 2, "seq_len": 4096, "micro_batch": 1, **_LARGE},
    {"model": "llama-70b", "ranks": 1000, "seq_len": 4096, "micro_batch": 1, **_LARGE},
    {
        "model": "llama-70b",
        "ranks": 512,
        "seq_len": 4096,
        "micro_batch": 1,
        **_LARGE,
        "budget": "70GB",
    },
    {"model": "llama-405b", "ranks": 512, "seq_len": 4096, "micro_batch": 1, **_LARGE},
)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=_PARTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--worker")
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(_simulate(**json.loads(options.worker))))
        return 0
    record: dict[str, Any] = {"environment": snapshot({"only": options.only}, {})}
    if options.only in (None, "published"):
        record["published"] = _compare()
    for part, runs in (("overlap", OVERLAP), ("costs", COSTS)):
        if options.only in (None, part):
            record[part] = [_told(run, _ask(run)) for run in runs]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "simulate.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _compare() -> dict[str, Any]:
    rows = []
    for run in RUNS:
        found = _ask(_settings(run))
        error = found["tokens_per_s"] / run.tokens_per_s - 1
        peak = found["peak_bytes"] / 2**30
        rows.append({**asdict(run), "simulated": found, "error": error})
        published_peak = "" if run.peak_gib is None else f", peak {peak:.1f} of {run.peak_gib} GiB"
        print(
            f"{run.source} {run.model:12} {run.ranks:4} x {run.device:10} {run.checkpointing:9} "
            f"{run.tokens_per_s:7,.0f} tokens/s, simulated {found['tokens_per_s']:7,.0f}: {error:+6.1%}"
            f"{' (fitted)' if run.fitted else ''}{published_peak}",
            flush=True,
        )
    checked = [abs(row["error"]) for row in rows if not row["fitted"]]
    every = [abs(row["error"]) for row in rows]
    print(
        f"absolute error: median {statistics.median(every):.1%}, largest {max(every):.1%}; of runs that nothing was "
        f"fitted to {statistics.median(checked):.1%}, {max(checked):.1%}"
    )
    return {"rows": rows, "median": statistics.median(every), "largest": max(every)}


def _settings(run: Published) -> dict[str, Any]:
    left_out = "source", "tokens_per_s", "peak_gib", "fitted"
    settings = {name: value for name, value in asdict(run).items() if name not in left_out}
    return {**settings, "network": run.network}


def _ask(settings: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{settings}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _simulate(
    model: str,
    ranks: int,
    seq_len: int,
    micro_batch: int,
    accumulation: int = 1,
    checkpointing: str = "none",
    shard_size: int | None = None,
    budget: str | None = None,
    **hardware: Any,
) -> dict[str, Any]:
    from torchloom.simulation.choices import Choice, simulate_choice

    base = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "compile": {"chunk_loss": "never"},  # published runs made all logits
    }
    choice = Choice(
        world_size=ranks,
        shard_size=shard_size,
        batch=micro_batch,
        accumulation=accumulation,
        budget=budget,
        checkpointing=checkpointing,
        base=base,
    )
    began = time.process_time()
    found = simulate_choice(choice, model, seq_len, **hardware).to_dict()
    del found["plan"]
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **found,
        "cpu_s": time.process_time() - began,
        "rss_bytes": used.ru_maxrss * 1024,
    }


def _told(run: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    share = found["exposed_s"] / found["network_s"]
    budget = f", budget {run['budget']}" if "budget" in run else ""
    print(
        f"{run['model']} on {run['ranks']} ranks{budget}: {found['cpu_s']:.0f} s of CPU, "
        f"{found['rss_bytes'] / 1e9:.2f} GB; waits {1e3 * found['exposed_s']:.1f} of {1e3 * found['network_s']:.1f} ms "
        f"that the network is busy ({share:.1%}); peak {found['peak_bytes'] / 1e9:.1f} GB",
        flush=True,
    )
    return {**run, "simulated": found}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
