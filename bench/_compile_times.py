"""First-step time of compiled arms, cold and warm, each in fresh processes.

    repeat:  empty cache -> arm A -> arm A again   |   empty cache -> arm B -> arm B again   | ...

Cold, every on-disk cache is a new empty folder; warm, the folder that the cold run left. The arms take
turns within a repeat, so ratios are paired. CPU seconds, compilers included, stand beside wall time:
they change less when other processes want the cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from _environment import worker_environment
from _group import ArmError, Group
from _rounds import Say
from peers import Arm

_TIMEOUT_S = 900.0
_WARMUP = 3


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
    for repeat in range(repeats):
        for arm in arms:
            if arm.name in missing:
                continue
            try:
                pair = _cold_then_warm(arm, repeat, batch, world_size, log_dir)
            except ArmError as error:
                missing[arm.name] = str(error)
                say(f"first step of {arm.label}: {error}")
                continue
            steps += pair
            say(f"first step of {arm.label}: " + ", ".join(map(_words, pair)))
    return steps, missing


def _cold_then_warm(
    arm: Arm, repeat: int, batch: int, world_size: int, log_dir: Path
) -> list[FirstStep]:
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        environment = worker_environment(Path(folder))
        steps: list[FirstStep] = []
        for cache in ("cold", "warm"):
            group = Group(
                arm, batch=batch, world_size=world_size, log_dir=log_dir, environment=environment
            )
            try:
                answers = group.ask({"do": "build", "warmup": _WARMUP}, timeout_s=_TIMEOUT_S)
            finally:
                group.close()
            slowest = max(answers, key=lambda answer: answer["first_step_s"])
            steps.append(
                FirstStep(
                    arm=arm.name,
                    repeat=repeat,
                    cache=cache,
                    first_step_s=slowest["first_step_s"],
                    compile_s=slowest["first_step_s"] - slowest["warm_step_s"],
                    cpu_s=slowest["first_step_cpu_s"],
                )
            )
        return steps


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


def _words(step: FirstStep) -> str:
    return f"{step.cache} {step.first_step_s:.1f} s"
