"""What compiled code depends on besides the model: versions, torchloom's own sources, the machine."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

import torch


def machine_of(device_types: Sequence[str]) -> dict[str, str]:
    """Return what compiled code depends on: versions, sources, the processor, the number of threads, the GPU.

    Inductor compiles for the very processor (`-march=native`) and writes the number of threads into its loops.

    Args:
        device_types: the types of the devices that it runs on, such as "cpu".
    """
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts["torchloom"] = _sources_digest()
    facts["machine"] = platform.machine()
    facts["vector instructions"] = torch.backends.cpu.get_cpu_capability()
    facts["processor"] = _processor()
    facts["threads"] = str(torch.get_num_threads())
    for kind in sorted(set(device_types) - {"cpu"}):
        module = torch.get_device_module(kind)
        facts[kind] = str(module.get_device_properties(0)) if module.is_available() else "none"
    return facts


_BUILDING = ("_torch", "custom_ops", "graph", "ops", "pieces", "regions", "serve")
"""Rooms whose code decides what a program is, whole, so that no new file is forgotten."""


@functools.cache
def _sources_digest() -> str:
    """Return a hash of the sources that build programs; read once: what runs is what was imported."""
    house = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for room in _BUILDING for path in (house / room).rglob("*.py")):
        digest.update(str(path.relative_to(house)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
