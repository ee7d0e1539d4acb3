"""The machine that compiled code is for."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

import torch


def machine_of(device_types: Sequence[str]) -> dict[str, str]:
    """Return what compiled code depends on: versions, the processor, the number of threads, the GPU.

    Inductor compiles for the very processor (`-march=native`) and writes the number of threads into its loops.
    """
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts["machine"] = platform.machine()
    facts["vector instructions"] = torch.backends.cpu.get_cpu_capability()
    facts["processor"] = _processor()
    facts["threads"] = str(torch.get_num_threads())
    for kind in sorted(set(device_types) - {"cpu"}):
        module = torch.get_device_module(kind)
        facts[kind] = str(module.get_device_properties(0)) if module.is_available() else "none"
    return facts


@functools.cache
def _processor() -> str:
    """Return the processor's name with a hash of all that it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = dict(
        reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line])
    )
    flags = said.get("flags", said.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    return f"{said.get('model name', platform.processor())} ({digest})"
