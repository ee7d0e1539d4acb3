"""First-step time of compiled arms, cold and warm, each in fresh processes.

    repeat:  A in an empty cache, B in an empty cache;  then 3 times: A in its cache, B in its cache

Cold, every on-disk cache is a new empty folder; warm, the folder that the cold run left. The arms take
turns, so ratios are paired. A warm compile takes seconds and costs little to repeat; it is noisy, too,
so it is repeated more often. CPU seconds, compilers included, stand beside wall time: they change less
when other processes want the cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from _environment import worker_environment
from _group import ArmError, Group
from _rounds import Say
from arms import Arm

_TIMEOUT_S = 900.0
_WARMUP = 3
_WARM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStep:
    """The first step of one fresh worker group, of the rank that took longest."""

    arm: str
    repeat: int
    cache: Literal["cold", "warm"]
    first_step_s: float
    compile_s: float
    """The first step less a later one."""
    cpu_s: float
    """CPU seconds of the first step, C++ compilers included."""


def measure_first_steps(
    arms: Sequence[Arm], *, batch: int, world_size: int, repeats: int, log_dir: Path, say: Say
) -> tuple[list[FirstStep], dict[str, str]]:
    """Return the first steps of `arms`, and the arms that could not run with the reason."""
    steps: list[FirstStep] = []
    missing: dict[str, str] = {}

    def measure(arm: Arm, cache: Literal["cold", "warm"], repeat: int, folder: str) -> None:
        if arm.name in missing:
            return
        group = Group(
            arm,
            batch=batch,
            world_size=world_size,
            log_dir=log_dir,
            environment=worker_environment(Path(folder)),
        )
        try:
            answers = group.ask({"do": "build", "warmup": _WARMUP}, timeout_s=_TIMEOUT_S)
        except ArmError as error:
            missing[arm.name] = str(error)
            say(f"first step of {arm.label}: {error}")
            return
        finally:
            group.close()
        steps.append(_slowest(answers, arm, cache, repeat))
        say(f"first step of {arm.label}: {cache} {steps[-1].first_step_s:.1f} s")

    for repeat in range(repeats):
        with ExitStack() as folders:
            caches = {
                arm.name: folders.enter_context(tempfile.TemporaryDirectory(prefix="bench-cache-"))
                for arm in arms
            }
            for arm in arms:
                measure(arm, "cold", repeat, caches[arm.name])
            for warm in range(_WARM_ROUNDS):
                for arm in arms:
                    measure(arm, "warm", repeat * _WARM_ROUNDS + warm, caches[arm.name])
    return steps, missing


def _slowest(
    answers: Sequence[Mapping[str, float]],
    arm: Arm,
    cache: Literal["cold", "warm"],
    repeat: int,
) -> FirstStep:
    slowest = max(answers, key=lambda answer: answer["first_step_s"])
    return FirstStep(
        arm=arm.name,
        repeat=repeat,
        cache=cache,
        first_step_s=slowest["first_step_s"],
        compile_s=slowest["first_step_s"] - slowest["warm_step_s"],
        cpu_s=slowest["first_step_cpu_s"],
    )


def compile_ratios(
    steps: Sequence[FirstStep], arm: str, base: str, cache: Literal["cold", "warm"]
) -> list[float]:
    """Return the ratio of compile times for each repeat that measured both arms."""
    times = {(step.arm, step.repeat): step.compile_s for step in steps if step.cache == cache}
    repeats = sorted({repeat for _, repeat in times})
    return [
        times[arm, repeat] / times[base, repeat]
        for repeat in repeats
        if (arm, repeat) in times and (base, repeat) in times
    ]
