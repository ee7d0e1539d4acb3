"""Memory of a step from torch's allocator events, plus shared memory that the allocator cannot see.

    log on -> build -> warm-up steps, a mark before and after each -> log off -> integrate the events

The log begins before the model exists, so the sum of the events up to a step's start is what is alive
there, and a block that was allocated before the step and freed inside it counts as freed.
`_allocator.cpp` writes the log and says why it is not torch's profiler that does.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_name("_allocator.cpp")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MARK = 0


class StepMemory(NamedTuple):
    """What a step found alive and how much more it held at its highest point."""

    live_bytes: int
    peak_bytes: int
    """Highest point of the step, above `live_bytes`."""


class AllocationLog:
    """Replaces torch's CPU allocator by one that logs, until `stop`. One log per process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.bench_num_events.restype = ctypes.c_int64
        self._library.bench_install()

    def mark(self) -> None:
        """Mark the start of a step, or its end, which may be the start of the next."""
        self._library.bench_mark()

    def stop(self) -> list[StepMemory]:
        """End the log and return the memory of each interval between two marks."""
        events = (ctypes.c_int64 * self._library.bench_num_events())()
        self._library.bench_take_events(events)
        return integrate(events)


def integrate(events: Iterable[int]) -> list[StepMemory]:
    """Return the memory of each interval between marks.

    Args:
        events: in order of time, +bytes for an allocation, -bytes for a free, 0 for a mark.
    """
    steps: list[StepMemory] = []
    alive = peak = 0
    live: int | None = None
    for num_bytes in events:
        if num_bytes == _MARK:
            if live is not None:
                steps.append(StepMemory(live, peak - live))
            live = peak = alive
        alive += num_bytes
        peak = max(peak, alive)
    return steps


def compile_allocator(folder: Path) -> Path:
    """Compile the logging allocator into `folder` against the installed torch; return the library.

    Raises:
        RuntimeError: the C++ compiler failed; the message holds its output.
    """
    torch_dir = Path(sysconfig.get_path("purelib")) / "torch"
    library = folder / "allocator.so"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{torch_dir / 'include'}"]
    command += [str(_SOURCE), "-o", str(library), f"-L{torch_dir / 'lib'}", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the logging allocator does not compile:\n{done.stderr}")
    return library


def read_rollup() -> dict[str, int]:
    """Return this process's share of physical memory by kind, in bytes (`Pss_Anon`, `Pss_Shmem`)."""
    return parse_rollup(_ROLLUP.read_text())


def parse_rollup(text: str) -> dict[str, int]:
    """Parse the "<name>: <n> kB" lines of smaps_rollup; its first line is a header."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows}


def trim_heap() -> None:
    """Give free heap pages back, so that waiting workers hold little more than their tensors."""
    ctypes.CDLL(None).malloc_trim(0)
