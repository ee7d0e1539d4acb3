"""torchloom beside its peers: the same model, data and seeds, in one interleaved run.

    python bench/train.py                       all arms, batch 4 and 1, compile times
    python bench/train.py --quick               few arms, few rounds, batch 4
    python bench/train.py --arms limit-compiled,fsdp2-whole,loom-3 --batch 1
    python bench/train.py --accumulation 4 --arms limit-compiled,fsdp2-whole,loom-3,loom-3-selective

Prints ratios to the limit (replicas that run at the same time and never talk), and writes
`train.json`, one chart for each batch size and the workers' logs. See bench/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _compile_times import measure_first_steps
from _environment import snapshot, worker_environment
from _memory import compile_allocator
from _options import names, pace_of, recorded, timed_say
from _report import Report, table, write_chart, write_json
from _rounds import run_pass
from _verdicts import OURS, PLAIN, judge_compile, judge_pass
from arms import ARMS, Arm, pick_arms

_HERE = Path(__file__).parent
_QUICK = ("limit-compiled", "fsdp2-whole", "loom-3", "loom-3-shared")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    say = timed_say()
    arms = pick_arms(options.arms)
    log_dir = options.out / "logs"
    environment = worker_environment(options.cache)
    report = Report(environment=snapshot(recorded(options), environment))
    pace = pace_of(options)
    allocator = compile_allocator(options.cache)
    for batch in options.batch:
        result = run_pass(
            arms,
            batch=batch,
            world_size=options.ranks,
            pace=pace,
            log_dir=log_dir,
            environment=environment,
            allocator=allocator,
            say=say,
            accumulation=options.accumulation,
        )
        report.passes.append(result)
        report.verdicts += judge_pass(result)
        print("\n" + table(result, options.arms, pace.min_clean) + "\n", flush=True)
        note = write_chart(result, options.arms, options.out / f"train-batch{batch}.svg")
        if note:
            say(note)
        write_json(report, options.out / "train.json")
    if options.compile_times:
        report.first_steps, _ = measure_first_steps(
            _compile_arms(arms),
            batch=min(options.batch),  # short steps: what is not compiling weighs least
            world_size=options.ranks,
            repeats=options.compile_repeats,
            log_dir=log_dir / "compile",
            say=say,
        )
        report.verdicts += judge_compile(report.first_steps)
        write_json(report, options.out / "train.json")
    print("\n".join(report.verdicts))
    return 0


def _compile_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms whose compile times are compared, plain `torch.compile` first."""
    return [ARMS[PLAIN], *(arm for arm in arms if arm.name == OURS)]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", type=names, help=f"comma-separated, of: {', '.join(ARMS)} (default: all)")
    add("--batch", type=_numbers, help="sequences per rank, comma-separated (default: 4,1)")
    add("--accumulation", type=int, default=1, help="micro-steps of a step (default: 1)")
    add("--rounds", type=int, help="rounds at least (default: 5)")
    add("--burst", type=int, default=2, help="recorded steps of an arm in a burst")
    add("--tries", type=int, default=4, help="bursts per round until one has a clean step")
    add("--patience", type=float, default=10.0, help="seconds to wait for quiet before a burst")
    add("--min-clean", type=int, default=8, help="clean steps wanted of each arm")
    add("--max-minutes", type=float, default=15.0, help="time for the rounds of a batch size")
    add("--ranks", type=int, default=2, help="processes of an arm, one thread each")
    add("--quick", action="store_true", help=f"few rounds, batch 4, {', '.join(_QUICK)}")
    add("--no-compile-times", dest="compile_times", action="store_false")
    add("--compile-repeats", type=int, help="cold and warm first steps of each arm (default: 3)")
    add("--out", type=Path, default=_HERE / "out", help="folder for results")
    add("--cache", type=Path, default=_HERE.parent / ".cache" / "bench", help="compiled kernels")
    options = parser.parse_args(arguments)
    few = options.quick
    options.arms = options.arms or (list(_QUICK) if few else list(ARMS))
    options.batch = options.batch or ([4] if few else [4, 1])
    options.rounds = options.rounds or (2 if few else 5)
    options.compile_repeats = options.compile_repeats or (1 if few else 3)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in names(text)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
