"""What the commands of the benchmark do with their options alike."""

from __future__ import annotations

import argparse
import sys
import time

from _rounds import Pace, Say


def timed_say() -> Say:
    """Return what prints progress to stderr, with the seconds since this call."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def pace_of(options: argparse.Namespace) -> Pace:
    """Return how long and how finely to measure, by the options of a command."""
    return Pace(
        burst=options.burst,
        tries=options.tries,
        patience_s=options.patience,
        min_rounds=options.rounds,
        min_clean=options.min_clean,
        max_minutes=options.max_minutes,
    )


def recorded(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that shape the numbers; folders do not."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "cache")}


def names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def sizes(text: str) -> dict[str, int]:
    """Return the numbers by name of `a=1,b=2`."""
    return {name: int(number) for name, _, number in (part.partition("=") for part in names(text))}
