"""How long a step took, and whether this process really had its core meanwhile.

Three clocks of the Linux kernel are read around each step: the process's own CPU time, the time its
threads stood runnable in a run queue (`/proc/self/task/*/schedstat`), and the whole machine's busy
and stolen time (`/proc/stat`). `_stats.are_clean` judges by them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Clocks at one moment, or their differences over a step; all in seconds."""

    wall_s: float
    cpu_s: float
    """CPU time of this process, all threads."""
    wait_s: float
    """Time that its threads were runnable but not running."""
    machine_busy_s: float
    """CPU time of everything on the machine, summed over cores."""
    machine_steal_s: float
    """CPU time that the hypervisor gave to somebody else."""

    def since(self, start: Reading) -> Reading:
        """Return the time that passed from `start` to this reading."""
        return Reading(
            wall_s=self.wall_s - start.wall_s,
            cpu_s=self.cpu_s - start.cpu_s,
            wait_s=self.wait_s - start.wait_s,
            machine_busy_s=self.machine_busy_s - start.machine_busy_s,
            machine_steal_s=self.machine_steal_s - start.machine_steal_s,
        )


def read_clocks() -> Reading:
    """Read all clocks now."""
    busy_s, steal_s = parse_machine_stat(_STAT.read_text())
    return Reading(
        wall_s=time.perf_counter(),
        cpu_s=time.process_time(),
        wait_s=_read_wait_s(),
        machine_busy_s=busy_s,
        machine_steal_s=steal_s,
    )


def wait_until_quiet(patience_s: float, *, look_s: float = 0.25, max_busy: float = 0.1) -> bool:
    """Sleep until the machine is nearly idle for `look_s`, or `patience_s` are over.

    Returns:
        Whether it became quiet.
    """
    deadline = time.monotonic() + patience_s
    num_cores = os.cpu_count() or 1
    while time.monotonic() < deadline:
        before = parse_machine_stat(_STAT.read_text())[0]
        time.sleep(look_s)
        busy_s = parse_machine_stat(_STAT.read_text())[0] - before
        if busy_s <= max_busy * num_cores * look_s:
            return True
    return False


def parse_schedstat(text: str) -> float:
    """Return the run-queue wait in seconds: "<running ns> <waiting ns> <slices>"."""
    return int(text.split()[1]) * 1e-9


def parse_machine_stat(text: str) -> tuple[float, float]:
    """Return (busy, stolen) seconds, summed over cores, from the first line of /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in text.split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S


def _read_wait_s() -> float:
    return sum(map(_task_wait_s, _TASKS.iterdir()))


def _task_wait_s(task: Path) -> float:
    try:
        return parse_schedstat((task / "schedstat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # the thread ended after it was listed
