"""What looking costs: the registry of backends, and a watch over a training run.

    python bench/watching.py [--quick]

    registry   register, look up and list 1000 backends           must: under 0.1 s
    compile    warm compile of the stage-3 engine under a watch   must: at most 1.10x
    step       a step of it under a watch                         must: at most 1.01x

The two arms, watched and not, take turns as in bench/train.py. Writes JSON beside the other results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from _compile_times import compile_ratios, measure_first_steps
from _environment import snapshot, worker_environment
from _memory import compile_allocator
from _options import timed_say
from _rounds import Pace, run_pass
from _stats import Quartiles, paired_ratios, summarize
from arms import ARMS

_HERE = Path(__file__).parent
_PLAIN = ARMS["loom-3"]
_WATCHED = replace(
    _PLAIN,
    name="loom-3-watched",
    family="torchloom 3, watched",
    options={**_PLAIN.options, "watched": True},
)
_NUM_BACKENDS = 1000
_LIMITS = {"registry_s": 0.1, "compile": 1.10, "step": 1.01}

_REGISTRY = f"""
import time
from torchloom.backends import list_backends, lookup_backend, register_backend
list_backends()
def backend(gm, example_inputs):
    return gm.forward
started = time.perf_counter()
for i in range({_NUM_BACKENDS}):
    register_backend(backend, f"bench{{i}}")
for i in range({_NUM_BACKENDS}):
    lookup_backend(f"bench{{i}}")
list_backends()
print(time.perf_counter() - started)
"""


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each promise, write JSON; return 1 if one is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, default=_HERE / "out")
    parser.add_argument("--cache", type=Path, default=_HERE.parent / ".cache" / "bench")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    say = timed_say()
    environment = worker_environment(options.cache)
    registry_s = [_registry_s() for _ in range(5)]
    arms, log_dir = [_PLAIN, _WATCHED], options.out / "logs"
    pace = Pace(min_rounds=3 if options.quick else 8, min_clean=6 if options.quick else 16)
    steps = run_pass(
        arms,
        batch=1,
        world_size=2,
        pace=pace,
        log_dir=log_dir,
        environment=environment,
        allocator=compile_allocator(options.cache),
        say=say,
    )
    first_steps, missing = measure_first_steps(
        arms,
        batch=1,
        world_size=2,
        repeats=1 if options.quick else 2,
        log_dir=log_dir / "compile",
        say=say,
    )
    for name, reason in missing.items():
        say(f"{name} could not run: {reason}")
    found: dict[str, Quartiles | None] = {
        "registry_s": summarize(registry_s),
        "compile": summarize(compile_ratios(first_steps, _WATCHED.name, _PLAIN.name, "warm")),
        "step": summarize(paired_ratios(steps.samples, _WATCHED.name, _PLAIN.name)),
    }
    _write(options, environment, found, options.out / "watching.json")
    kept = [_judge(name, value) for name, value in found.items()]
    return 0 if all(kept) else 1


def _registry_s() -> float:
    done = subprocess.run(
        [sys.executable, "-c", _REGISTRY], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def _judge(name: str, value: Quartiles | None) -> bool:
    if value is None:
        print(f"UNSURE {name}: nothing measured")
        return False
    kept = value.median <= _LIMITS[name]
    print(
        f"{'kept  ' if kept else 'BROKEN'} {name}: {value.median:.4f} "
        f"[{value.low:.4f}-{value.high:.4f}], {value.num} repeats (at most {_LIMITS[name]})"
    )
    return kept


def _write(
    options: argparse.Namespace,
    environment: dict[str, str],
    found: dict[str, Quartiles | None],
    path: Path,
) -> None:
    results = {name: None if value is None else value._asdict() for name, value in found.items()}
    shaping = {"quick": options.quick, "plain": asdict(_PLAIN)["name"]}
    data = {"environment": snapshot(shaping, environment), "results": results}
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
