"""Kills at random moments: when, what, and doing it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _tree import Tree

KINDS = ("worker", "save", "launcher")
_PARTIAL = ".torchloom-partial-*"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill that is planned."""

    step: int
    """The run must have come here."""
    kind: str
    """"worker": one rank; "launcher": the elastic agent; "save": a rank that is writing a checkpoint;
    "start": a rank that the kill before made start anew, before it has trained."""
    rank: int
    delay_s: float
    """What else passes before it."""


@dataclass(frozen=True, kw_only=True)
class Killed:
    """One kill that was done."""

    kind: str
    step: int
    """Of rank 0 at that moment."""
    rank: int | None
    left_partial: bool
    """Whether a save was broken off: its folder was still there."""

    def to_plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def plan_kills(num: int, steps: int, seed: int) -> list[Kill]:
    """Return kills in the order of their steps: kinds in turn, one of ten while ranks start."""
    source = random.Random(f"kills {seed}")
    kinds = [KINDS[index % len(KINDS)] for index in range(num)]
    source.shuffle(kinds)
    places = sorted(source.randrange(steps // 20, steps - steps // 20) for _ in kinds)
    if num >= 10:
        kinds[-1], places[-1] = "start", places[-2]
    return [
        Kill(
            step=place,
            kind=kind,
            rank=source.randrange(2),
            delay_s=source.random() * {"save": 0.01, "start": 4.0}.get(kind, 0.05),
        )
        for kind, place in zip(kinds, places, strict=True)
    ]


def do_kill(
    kill: Kill, tree: Tree, folder: Path, launcher: int, at: Callable[[], int], limit_s: float
) -> Killed | None:
    """Wait for the moment of a kill whose step has come, and kill; None if the moment never came."""
    checkpoints = folder / "checkpoints"
    deadline = time.monotonic() + limit_s
    if kill.kind == "save":
        while not any(checkpoints.glob(_PARTIAL)):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
    while kill.kind != "launcher" and kill.rank not in tree.workers():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    time.sleep(kill.delay_s)
    victim = launcher if kill.kind == "launcher" else tree.workers().get(kill.rank)
    if victim is None or not tree.kill(victim):
        return None
    step = at()
    return Killed(
        kind=kill.kind,
        step=step,
        rank=None if kill.kind == "launcher" else kill.rank,
        left_partial=any(checkpoints.glob(_PARTIAL)),
    )
