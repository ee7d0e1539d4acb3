"""Whether what a run holds stays level: slopes over steps within a process, and over restarts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SETTLED_STEPS = 100
"""Steps after a start that do not count: allocators and caches fill."""
_MIN_SAMPLES = 8
MAX_RSS_KIB_PER_1000 = 8 << 10
"""Growth of memory over 1000 steps that still counts as level: the heap's own unrest. One tensor of
a step that stayed alive (a batch: 384 bytes, a gathered layer: 8 KiB) would add 0.4 to 8 MiB."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    below = sum((x - mean_x) ** 2 for x, _ in points)
    return above / below if below else 0.0


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """Return all lines that the ranks left; a killed one may have left half a line."""
    found = []
    for path in sorted(folder.glob("facts-*")):
        rank = int(path.name.partition("-")[2])
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                found.append({"rank": rank, **json.loads(line)})
    return found


def within_processes(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, of the processes that ran for long, growth per 1000 steps, at most.

    Memory is a slope. Threads and descriptors are numbers that come back: their least over the second
    half against that over the first.
    """
    lives: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in facts:
        lives[each["rank"], each["pid"]].append(each)
    rss, threads, descriptors = [], [], []
    for life in lives.values():
        first = life[0]["step"]
        settled = [each for each in life if each["step"] - first >= SETTLED_STEPS]
        if len(settled) < _MIN_SAMPLES:
            continue
        rss.append(1000 * slope([(each["step"], each["rss_kib"]) for each in settled]))
        half = len(settled) // 2
        for name, into in (("threads", threads), ("descriptors", descriptors)):
            before = min(each[name] for each in settled[:half])
            into.append(min(each[name] for each in settled[half:]) - before)
    return {
        "num_processes": len(rss),
        "rss_kib_per_1000_steps": max(rss, default=None),
        "more_threads": max(threads, default=None),
        "more_descriptors": max(descriptors, default=None),
    }


def grown(samples: Sequence[dict[str, int]]) -> list[str]:
    """Return what the samples taken after each restart show to grow: more at the end than ever before.

    Two at least of the first samples are compared with two at least of the last ones.
    """
    half = len(samples) // 2
    if half < 2:
        return []
    before, after = samples[:half], samples[half:]
    return [
        f"{name}: {[each[name] for each in samples]}"
        for name in samples[0]
        if name != "step" and min(each[name] for each in after) > max(each[name] for each in before)
    ]
