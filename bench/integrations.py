"""Hugging Face's Trainer with torchloom beside Trainer with FSDP2, with DeepSpeed ZeRO-3 and with DDP, in one run.

    python bench/integrations.py                       all arms, batch 4
    python bench/integrations.py --arms trainer-loom,trainer-fsdp2-block --rounds 3

A Llama of 34 M weights on two ranks; the arms take turns, round after round, as in `bench/train.py`. Prints the
step time of each arm and its ratio to torchloom's in the same rounds, and writes `integrations.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _environment import snapshot, worker_environment
from _memory import compile_allocator
from _options import names, pace_of, recorded, timed_say
from _report import Report, common_step, write_json
from _rounds import PassResult, run_pass
from _stats import clean, fastest, paired_ratios, summarize
from arms import TRAINERS, pick_arms

_HERE = Path(__file__).parent
OURS = "trainer-loom"
RIVALS = {
    "FSDP2": ("trainer-fsdp2-eager", "trainer-fsdp2-block", "trainer-fsdp2-whole"),
    "DeepSpeed ZeRO-3": ("trainer-deepspeed-eager", "trainer-deepspeed-compiled"),
}
MAX_LOSS_DIFFERENCE = 1e-3
"""All arms clip the norm of gradients, whose sum each takes in another order."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    say = timed_say()
    environment = worker_environment(options.cache)
    report = Report(environment=snapshot(recorded(options), environment))
    result = run_pass(
        pick_arms(options.arms, TRAINERS),
        batch=options.batch,
        world_size=2,
        pace=pace_of(options),
        log_dir=options.out / "logs",
        environment=environment,
        allocator=compile_allocator(options.cache),
        say=say,
    )
    report.passes.append(result)
    report.verdicts += judge(result)
    print(table(result, options.arms))
    print("\n".join(report.verdicts))
    write_json(report, options.out / "integrations.json")
    return 0


def table(result: PassResult, arms: Sequence[str]) -> str:
    """Return a line for each arm: its step, and how many times torchloom's it takes."""
    step = common_step(result)
    head = (
        f"{'batch ' + str(result.batch):<42}{'step s':>8}{'ratio to torchloom':>24}{'clean':>7}"
        f"{'= MiB':>8}{f'loss@{step}':>11}"
    )
    lines = [head, "-" * len(head)]
    for arm in arms:
        label = TRAINERS[arm].label
        if arm in result.missing:
            lines.append(f"{label:<42}  not run: {result.missing[arm]}")
            continue
        good, facts = clean(result.samples, arm), result.facts[arm]
        ratio = summarize(paired_ratios(result.samples, arm, OURS))
        seconds = summarize([sample.wall_s for sample in good])
        told = f"{ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}]" if ratio else "-"
        mib = (facts.live_bytes + facts.peak_bytes + facts.shared_bytes) / 2**20
        lines.append(
            f"{label:<42}{seconds.median if seconds else float('nan'):>8.3f}{told:>24}{len(good):>7}"
            f"{mib:>8.0f}{result.losses[arm][step - 1]:>11.5f}"
        )
    return "\n".join(lines)


def judge(result: PassResult) -> list[str]:
    """Return a line for each promise: ahead of the fastest arm of each peer, and the losses of all."""
    lines = []
    for family, arms in RIVALS.items():
        rival = fastest(result.samples, arms)
        ratio = summarize(paired_ratios(result.samples, OURS, rival)) if rival else None
        if rival is None or ratio is None:
            lines.append(f"UNSURE {family}: no clean round")
            continue
        mark = "kept  " if ratio.high < 1 else "BROKEN"
        lines.append(
            f"{mark} Trainer with torchloom takes {ratio.median:.3f} [{ratio.low:.3f}-{ratio.high:.3f}] of "
            f"{TRAINERS[rival].label}, {ratio.num} rounds"
        )
    step = common_step(result)
    values = [losses[step - 1] for losses in result.losses.values()]
    difference = max(values) - min(values)
    mark = "kept  " if difference <= MAX_LOSS_DIFFERENCE else "BROKEN"
    lines.append(f"{mark} losses: {len(values)} arms within {difference:.1e} at step {step}")
    return lines


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/integrations.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arms", type=names, default=list(TRAINERS), help="comma-separated (default: all)")
    add("--batch", type=int, default=4, help="sequences per rank (default: 4)")
    add("--rounds", type=int, default=5, help="rounds at least (default: 5)")
    add("--burst", type=int, default=2, help="recorded steps of an arm in a burst")
    add("--tries", type=int, default=4, help="bursts per round until one has a clean step")
    add("--patience", type=float, default=10.0, help="seconds to wait for quiet before a burst")
    add("--min-clean", type=int, default=8, help="clean steps wanted of each arm")
    add("--max-minutes", type=float, default=15.0, help="time for the rounds")
    add("--out", type=Path, default=_HERE / "out", help="folder for results")
    add("--cache", type=Path, default=_HERE.parent / ".cache" / "bench", help="compiled kernels")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
