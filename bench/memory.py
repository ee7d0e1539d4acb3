"""Peak memory against step time: torchloom under six budgets, beside what torch offers for the same.

    python bench/memory.py                      all fields
    python bench/memory.py --quick              a tiny model, two budgets, about a minute
    python bench/memory.py --fields boxed       one field: inductor, boxed or sharded

Prints each point with predicted and measured peak and time, and writes `memory.json`, one chart for
each field and the workers' logs. See bench/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _environment import snapshot, worker_environment
from _fields import FIELDS, TINY, Field, free_arm, our_arm, pick_fields
from _group import ArmError
from _limits import budgets_between, find_limits
from _memory import compile_allocator
from _memory_report import table, write_chart, write_json
from _memory_verdicts import judge_field
from _options import names, pace_of, recorded, sizes, timed_say
from _points import FieldResult, field_result
from _rounds import Say, run_pass

_HERE = Path(__file__).parent


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return 1 if a field could not be measured at all."""
    options = _parse(arguments)
    say = timed_say()
    environment = worker_environment(options.cache)
    snapped = snapshot(recorded(options), environment)
    allocator = compile_allocator(options.cache)
    results: list[FieldResult] = []
    verdicts: list[str] = []
    for field in pick_fields(options.fields, options.peers, is_quick=options.quick):
        try:
            result = _measure(field, options, environment, allocator, say)
        except ArmError as error:
            verdicts.append(f"{field.name}: BROKEN runs: {error}")
            continue
        results.append(result)
        verdicts += judge_field(result)
        print("\n" + table(result, options.min_clean) + "\n", flush=True)
        note = write_chart(result, options.out / f"memory-{field.name}.svg")
        if note:
            say(note)
        write_json(snapped, results, verdicts, options.out / "memory.json")
    print("\n".join(verdicts))
    return 0 if len(results) == len(options.fields) else 1


def _measure(
    field: Field,
    options: argparse.Namespace,
    environment: dict[str, str],
    allocator: Path,
    say: Say,
) -> FieldResult:
    say(f"{field.name}: asking the planner what fits")
    shape = {**(TINY if options.quick else {}), **options.shape}
    log_dir = options.out / "logs"
    limits = find_limits(
        field,
        batch=options.batch,
        log_dir=log_dir / "limits",
        environment=environment,
        shape=shape,
    )
    say(f"{field.name}: budgets from {limits.min_bytes:,} to {limits.max_bytes:,} bytes")
    budgets = budgets_between(limits, options.budgets)
    ours = [our_arm(field, num_bytes, percent) for percent, num_bytes in budgets.items()]
    arms = [*ours, free_arm(field), *field.peers]
    measured = run_pass(
        arms,
        batch=options.batch,
        world_size=field.world_size,
        pace=pace_of(options),
        log_dir=log_dir,
        environment=environment,
        allocator=allocator,
        say=say,
        shape=shape,
        starts_ahead=options.quick,
    )
    return field_result(field, arms, measured)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/memory.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--fields", type=names, help=f"comma-separated, of: {', '.join(FIELDS)} (default: all)")
    add("--peers", type=names, help="peers by name, comma-separated (default: all of a field)")
    add("--budgets", type=int, help="budgets of torchloom in each field (default: 6)")
    add("--batch", type=int, default=4, help="sequences per rank")
    add("--shape", type=sizes, default={}, help="of the decoder: num_layers=12,dim=256")
    add("--rounds", type=int, help="rounds at least (default: 5)")
    add("--burst", type=int, default=2, help="recorded steps of an arm in a burst")
    add("--tries", type=int, help="bursts per round until one has a clean step (default: 3)")
    add("--patience", type=float, help="seconds to wait for quiet before a burst (default: 10)")
    add("--min-clean", type=int, help="clean steps wanted of each arm (default: 8)")
    add("--max-minutes", type=float, help="time for the rounds of a field (default: 12)")
    add("--quick", action="store_true", help="a tiny model, two budgets, one field (boxed)")
    add("--out", type=Path, default=_HERE / "out", help="folder for results")
    add("--cache", type=Path, default=_HERE.parent / ".cache" / "bench", help="compiled kernels")
    options = parser.parse_args(arguments)
    for name, (quick, full) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if options.budgets < 2:
        parser.error("--budgets takes 2 or more: the least, and no recomputation")
    options.out.mkdir(parents=True, exist_ok=True)
    return options


_DEFAULTS = {
    "fields": (["boxed"], list(FIELDS)),
    "budgets": (2, 6),
    "rounds": (3, 5),
    "tries": (1, 3),
    "patience": (0.5, 10.0),
    "min_clean": (3, 8),
    "max_minutes": (0.25, 12.0),
}
"""By option: for a quick run, else."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
