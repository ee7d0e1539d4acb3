"""One pass at one batch size: all arms alive at once, run in turn, round after round.

    build A, build B, ...  |  round 0: A B C ...  |  round 1: B C ... A  |  round 2: C ... A B  | ...

Whoever is not at work blocks in a read. The order rotates, so no arm always follows the same one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from _clock import wait_until_quiet
from _group import ArmError, Group
from _stats import StepSample, clean, merge_ranks
from arms import Arm

Say = Callable[[str], None]

_BUILD_TIMEOUT_S = 900.0
_STEP_TIMEOUT_S = 120.0
_MIN_AVAILABLE_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long and how finely to measure."""

    warmup: int = 3
    """Steps after building, the compiling one included; one step with a memory log follows."""
    burst: int = 2
    """Recorded steps of an arm in a burst; one settling step comes before them."""
    tries: int = 4
    """Bursts that an arm may take in a round until one holds a clean step."""
    patience_s: float = 10.0
    """How long a burst may wait for other processes to leave the cores."""
    min_rounds: int = 5
    min_clean: int = 8
    """Clean steps that each arm should have; more rounds are run until then."""
    max_minutes: float = 15.0
    """Time for the rounds of one batch size; building is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmFacts:
    """What an arm reported about itself when it was built; sizes are of the rank that held most."""

    build_s: float
    first_step_s: float
    live_bytes: int
    peak_bytes: int
    shared_bytes: int
    anonymous_bytes: int
    said: Mapping[str, Any] = field(default_factory=dict)
    """What its first rank says of itself; see `arms.base.Trainee.facts`."""


@dataclass(kw_only=True, slots=True)
class PassResult:
    """Everything measured at one batch size."""

    batch: int
    facts: dict[str, ArmFacts] = field(default_factory=dict)
    samples: list[StepSample] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Loss of each step from the first, mean over the ranks."""
    missing: dict[str, str] = field(default_factory=dict)
    """Arms that could not run, and why."""


def run_pass(
    arms: Sequence[Arm],
    *,
    batch: int,
    world_size: int,
    pace: Pace,
    log_dir: Path,
    environment: Mapping[str, str],
    allocator: Path,
    say: Say,
    accumulation: int = 1,
    shape: Mapping[str, int] | None = None,
    starts_ahead: bool = False,
) -> PassResult:
    """Build every arm, run the rounds, close every arm.

    A step is `accumulation` micro-steps. `shape` is other sizes of the model. With `starts_ahead` all processes import at once: sooner
    done, where nobody looks at the time of a build.
    """
    result = PassResult(batch=batch)
    groups: dict[str, Group] = {}

    def start(arm: Arm) -> Group:
        groups[arm.name] = Group(
            arm,
            batch=batch,
            world_size=world_size,
            log_dir=log_dir,
            environment=environment,
            accumulation=accumulation,
            allocator=allocator,
            shape=shape,
        )
        return groups[arm.name]

    try:
        ahead = {arm.name: start(arm) for arm in arms if starts_ahead}
        for arm in arms:
            say(f"batch {batch}: building {arm.label}")
            group = ahead.get(arm.name) or start(arm)
            with _or_out(group, groups, result, say):
                _build(group, result, pace)
        _run_rounds(groups, result, pace, say)
    finally:
        for group in groups.values():
            group.close()
    return result


def _build(group: Group, result: PassResult, pace: Pace) -> None:
    available = available_bytes()
    if available < _MIN_AVAILABLE_BYTES:
        raise ArmError(f"only {available >> 20} MiB of memory left: choose fewer arms")
    answers = group.ask({"do": "build", "warmup": pace.warmup}, timeout_s=_BUILD_TIMEOUT_S)
    name = group.arm.name
    result.facts[name] = ArmFacts(
        build_s=max(answer["build_s"] for answer in answers),
        first_step_s=max(answer["first_step_s"] for answer in answers),
        live_bytes=max(answer["live_bytes"] for answer in answers),
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        shared_bytes=max(answer["shared_bytes"] for answer in answers),
        anonymous_bytes=max(answer["anonymous_bytes"] for answer in answers),
        said=answers[0]["said"],
    )
    result.losses[name] = _mean_losses(answers)


def _run_rounds(groups: dict[str, Group], result: PassResult, pace: Pace, say: Say) -> None:
    deadline = time.monotonic() + pace.max_minutes * 60
    index = 0
    while groups and time.monotonic() < deadline:
        if index >= pace.min_rounds and _have_enough(groups, result, pace):
            break
        for group in _rotated(list(groups.values()), index):
            if time.monotonic() >= deadline:
                break
            with _or_out(group, groups, result, say):
                _run_turn(group, result, pace, index)
        say(f"batch {result.batch}: round {index + 1}, {_progress(groups, result)}")
        index += 1


def _run_turn(group: Group, result: PassResult, pace: Pace, index: int) -> None:
    """Run bursts until one holds a clean step, so that the round has a pair to compare."""
    for _ in range(pace.tries):
        wait_until_quiet(pace.patience_s)
        before = len(clean(result.samples, group.arm.name))
        _run_burst(group, result, pace, index)
        if len(clean(result.samples, group.arm.name)) > before:
            break


def _run_burst(group: Group, result: PassResult, pace: Pace, index: int) -> None:
    command = {"do": "run", "steps": pace.burst}
    timeout_s = _STEP_TIMEOUT_S * (pace.burst + 1)
    answers = group.ask(command, timeout_s=timeout_s)
    cores = os.cpu_count() or 1
    for ranks in zip(*(answer["samples"] for answer in answers), strict=True):
        result.samples.append(merge_ranks(group.arm.name, index, ranks, cores))
    result.losses[group.arm.name] += _mean_losses(answers)


@contextmanager
def _or_out(group: Group, groups: dict[str, Group], result: PassResult, say: Say) -> Iterator[None]:
    """An arm that fails inside leaves the pass and says why; the others go on."""
    try:
        yield
    except ArmError as error:
        say(f"batch {result.batch}: {group.arm.label} is out: {error}")
        result.missing[group.arm.name] = str(error)
        groups.pop(group.arm.name).close()


def _have_enough(groups: Mapping[str, Group], result: PassResult, pace: Pace) -> bool:
    return all(len(clean(result.samples, name)) >= pace.min_clean for name in groups)


def _progress(groups: Mapping[str, Group], result: PassResult) -> str:
    counts = [len(clean(result.samples, name)) for name in groups]
    return f"{min(counts, default=0)}-{max(counts, default=0)} clean steps per arm"


def _mean_losses(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    return [fmean(step) for step in zip(*(answer["losses"] for answer in answers), strict=True)]


def _rotated(items: list[Group], by: int) -> list[Group]:
    cut = by % len(items)
    return items[cut:] + items[:cut]


def available_bytes() -> int:
    """Return the memory that the machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ArmError("/proc/meminfo does not say how much memory is available")
