"""Offloading and memory budgets on one GPU, beside FSDP2: one call, under ten minutes.

    python bench/gpu/run.py                              a 1.3 B model, 16k tokens a step
    python bench/gpu/run.py --device cpu --tiny          the harness itself, anywhere

Measures the device first (`torchloom calibrate`'s figures), then runs each configuration in a process of
its own, and writes `gpu.json`: seconds and peak of a step, losses, whether offloading left
every weight as it was without, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parent))

from arm import FSDP, LOOM

from _environment import snapshot

_SHAPE = {"num_layers": 24, "dim": 2048, "num_heads": 16, "hidden_dim": 5632, "vocab_size": 32000}
_TINY = {"num_layers": 2, "dim": 64, "num_heads": 4, "hidden_dim": 96, "vocab_size": 300}
_REFERENCE = "loom"
_SAME = ("loom-states", "loom-states-activations", "loom-states-params")
"""Configurations that must leave every weight as the reference does."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    started = time.monotonic()
    report: dict[str, Any] = {
        "environment": snapshot(_recorded(options), {}),
        "device": _device(options.device),
        "calibration": _calibrate(options),
        "arms": [],
    }
    for arm in options.arms:
        left = options.minutes * 60 - (time.monotonic() - started)
        report["arms"].append(_run(arm, options, min(left, options.limit)))
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(_line(report["arms"][-1]), flush=True)
    report["verdicts"] = _verdicts(report["arms"])
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report["verdicts"]))
    return 0


def _run(arm: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    spec = {
        "arm": arm,
        "device": options.device,
        "shape": {**(_TINY if options.tiny else _SHAPE), "seq_len": options.seq_len},
        "batch": options.batch,
        "steps": options.steps,
        "warmup": options.warmup,
        "backend": options.backend,
    }
    if limit_s < 5:
        return {"arm": arm, "error": "no time left"}
    command = [sys.executable, str(_HERE / "arm.py"), json.dumps(spec)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return {"arm": arm, "error": f"took longer than {limit_s:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"arm": arm, "error": lines[-1] if lines else f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torchloom.costs import calibrate_device

    row, figures = calibrate_device(torch.device(options.device), quick=options.tiny)
    return {**asdict(row), **figures, "host_triad_bytes_per_s": _host_triad(options.tiny)}


def _host_triad(quick: bool) -> float:
    """Return the bytes per second of a = b + s c in host memory (McCalpin's STREAM)."""
    import torch

    b, c = (torch.rand((1 if quick else 64) << 20) for _ in range(2))
    a = torch.empty_like(b)
    seconds = []
    for _ in range(7):
        begun = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        seconds.append(time.perf_counter() - begun)
    return 3 * a.numel() * 4 / sorted(seconds)[3]


def _device(name: str) -> dict[str, Any]:
    import torch

    if not name.startswith("cuda"):
        return {"name": "cpu", "torch": torch.__version__}
    facts = torch.cuda.get_device_properties(name)
    return {
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _verdicts(arms: Sequence[dict[str, Any]]) -> list[str]:
    by_name = {each["arm"]: each for each in arms if "error" not in each}
    reference = by_name.get(_REFERENCE)
    if reference is None:
        return [f"no reference: {_REFERENCE} did not run"]
    found = []
    for name in _SAME:
        if name in by_name:
            same = all(by_name[name][key] == reference[key] for key in ("losses", "weights"))
            found.append(
                f"{'ok  ' if same else 'FAIL'} {name}: the same to the bit as {_REFERENCE}"
            )
    return found


def _line(arm: dict[str, Any]) -> str:
    if "error" in arm:
        return f"{arm['arm']:<26} not run: {arm['error']}"
    peak = "-" if arm["peak_bytes"] is None else f"{arm['peak_bytes'] / 1e9:.2f} GB"
    return (
        f"{arm['arm']:<26} step {arm['step_s']:.3f} s   peak {peak}   "
        f"first step {arm['first_step_s']:.1f} s   loss {arm['losses'][-1]:.5f}"
    )


def _recorded(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name != "out"}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = [*LOOM, *FSDP]
    add("--arms", type=lambda text: text.split(","), default=names, help=", ".join(names))
    add("--device", default="cuda", help="cuda or cpu")
    add("--tiny", action="store_true", help="a model of a few layers, to try the harness")
    add("--backend", default="inductor")
    add("--batch", type=int, help="sequences a step (default: 8; tiny: 2)")
    add("--seq-len", type=int, help="tokens of a sequence (default: 2048; tiny: 48)")
    add("--steps", type=int, default=6)
    add("--warmup", type=int, default=3)
    add("--limit", type=float, default=110.0, help="seconds for one configuration")
    add("--minutes", type=float, default=9.5, help="for all of them")
    add("--out", type=Path, default=_HERE.parent / "out" / "gpu.json")
    options = parser.parse_args(arguments)
    options.batch = options.batch or (2 if options.tiny else 8)
    options.seq_len = options.seq_len or (48 if options.tiny else 2048)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
