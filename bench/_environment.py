"""What a result depends on besides the code under test, recorded beside the numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "torchloom", "deepspeed")
_REPOSITORY = Path(__file__).parents[1]


def worker_environment(cache_dir: Path) -> dict[str, str]:
    """Return the variables of every worker: one thread, loopback only, one compile cache.

    The vector instruction set is taken as usable without a probe program, unless the caller's
    environment says otherwise: the probe would be a constant in every cold compile.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": os.environ.get("TORCHINDUCTOR_VEC_ISA_OK", "1"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "XDG_CACHE_HOME": str(cache_dir),
    }


def snapshot(options: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, object]:
    """Return versions, machine, flags and revision; no host names and no paths."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": _revision(),
        "options": dict(options),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "variables": {
            name: value
            for name, value in sorted(environment.items())
            if name not in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _revision() -> str:
    describe = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
