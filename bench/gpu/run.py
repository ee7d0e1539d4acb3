"""The first ten minutes on a GPU: what is predicted beside what is measured, and torchloom beside its peers, in one call.

    python bench/gpu/run.py                              12 layers, 0.7 B parameters, 16k tokens a step
    python bench/gpu/run.py --device cpu --quick         every part's code, anywhere, with a model of two layers

    calibrate   what the device and its link reach; the plans below use it
    plan        predicted peak and seconds of a step beside measured ones
    budget      the same under a budget of 70 % of that peak
    peers       torchloom, FSDP2 and torch.compile of the plain model, in turns
    offloads    states, activations and parameters on the host leave every weight as it was, to the bit
    serving     recorded programs beside mode="reduce-overhead"
    ranks       two ranks on the one device, over gloo, train as one does

`gpu.json` is written after each part; one that fails is told, and the next goes on. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parent))

from _environment import snapshot, worker_environment
from _group import ArmError, Group
from arms import Arm

_SHAPE = {"num_layers": 12, "dim": 2048, "num_heads": 16, "hidden_dim": 5632, "vocab_size": 32000}
_QUICK = {"num_layers": 2, "dim": 64, "num_heads": 4, "hidden_dim": 96, "vocab_size": 300}
_WARM = 12
"""Steps before figures are read: a plan is compared with the sixth that ran its graphs, and may be replaced after the first."""
_PEERS = ("loom", "fsdp2", "plain")
_PLENTY = 0.95
"""A budget that does not bind, so that there is a plan: a part of the device's memory."""
_OFFLOADS: dict[str, dict[str, Any]] = {
    "states": {"offload_opt_states": True},
    "states-activations": {"offload_opt_states": True, "offload_activation": True},
    "states-params": {"offload_opt_states": True, "offload_parameters": True},
}
Found = dict[str, Any]


class Bench:
    """Runs parts, each of which takes what earlier ones found.

    Args:
        options: of the command.
        folder: for logs, compiled code and the table of costs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self._folder = options, folder
        self.shape = {
            **(_QUICK if options.quick else _SHAPE),
            "seq_len": 48 if options.quick else 2048,
        }
        self.batch = 2 if options.quick else 8
        self.deadline_s = time.monotonic() + 60 * options.minutes
        self.found: dict[str, Any] = {}
        self._environment = {
            **worker_environment(folder),
            "TORCHLOOM_CACHE_DIR": str(folder),
            **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}),
            # The harness has one thread of compute per rank; a GPU's kernels are compiled beside each other.
            "TORCHINDUCTOR_COMPILE_THREADS": "1" if options.device == "cpu" else "8",
        }

    def left_s(self) -> float:
        """Return the seconds that a part may take: at most a third of the call."""
        return min(20 * self.options.minutes, self.deadline_s - time.monotonic())

    def calibrate(self) -> Found:
        """Measure the device."""
        return self._alone("calibrate", quick=self.options.quick)

    def plan(self) -> Found:
        """Compare a plan with its steps."""
        return self._planned("plan", _PLENTY)

    def budget(self) -> Found:
        """Compare a plan that has to save memory with its steps."""
        part = (
            0.85 if self.options.quick else 0.7
        )  # states outweigh the activations of a small model
        return self._planned("budget", int(part * self.found["plan"]["predicted_peak_bytes"]))

    def _planned(self, name: str, budget: float) -> Found:
        # Operators are measured after the first step, and the plan that runs goes by their times.
        found = self._train(name, memory_budget=budget, replan_step=1)
        return {
            **found,
            "budget": budget,
            "peak_off": found["predicted_peak_bytes"] / found["measured_peak_bytes"] - 1,
            "seconds_off": found["predicted_s"] / found["measured_s"] - 1,
        }

    def peers(self) -> Found:
        """Time arms that are all alive, a round each in turn."""
        groups = {name: self._group(name, name) for name in _PEERS}
        try:
            found = {name: self._built(group) for name, group in groups.items()}
            seconds: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(2 if self.options.quick else 5):
                for name, group in groups.items():
                    (ran,) = group.ask({"do": "run", "steps": 3}, timeout_s=self.left_s())
                    seconds[name] += [sample["wall_s"] for sample in ran["samples"]]
        finally:
            _close(groups.values())
        for name, each in seconds.items():
            found[name]["step_s"] = statistics.median(each)
        return found

    def offloads(self) -> Found:
        """Compare weights and losses with those of the plan without a budget."""
        reference, plenty = self.found["plan"], {"memory_budget": _PLENTY, "replan_step": 0}
        groups = {
            name: self._group(name, "loom", compiling={**plenty, **keys})
            for name, keys in _OFFLOADS.items()
        }
        try:
            found = {name: self._built(group) for name, group in groups.items()}
        finally:
            _close(groups.values())
        for each in found.values():
            each["is_equal"] = all(each[key] == reference[key] for key in ("losses", "weights"))
        return found

    def serving(self) -> Found:
        """Serve layers of the model."""
        shape = {**self.shape, "num_layers": 2, "seq_len": 16}
        # On a CPU without compiled code: the part's own code is what is tried there.
        backend = "eager" if self.options.quick else self.options.backend
        return self._alone("serving", shape=shape, backend=backend)

    def ranks(self) -> Found:
        """Train two ranks on the one device, with equal batches."""
        wanted = self.found["plan"]["losses"]
        found = self._train("ranks", world_size=2)
        pairs = zip(found["losses"], wanted, strict=True)
        found["losses_off"] = max(abs(mine - one) / one for mine, one in pairs)
        return found

    def _train(self, name: str, *, world_size: int = 1, **compiling: Any) -> Found:
        group = self._group(name, "loom", world_size, compiling)
        try:
            return self._built(group)
        finally:
            _close([group])

    def _group(
        self, name: str, kind: str, world_size: int = 1, compiling: Mapping[str, Any] | None = None
    ) -> Group:
        arm = Arm(
            name=name,
            module="arms.one_gpu",
            family=kind,
            variant="compiled",
            options={
                "kind": kind,
                "device": self.options.device,
                "backend": self.options.backend,
                "compiling": dict(compiling or {}),
            },
        )
        return Group(
            arm,
            batch=self.batch,
            world_size=world_size,
            log_dir=self._folder,
            environment=self._environment,
            shape=self.shape,
        )

    def _built(self, group: Group) -> Found:
        built = group.ask({"do": "build", "warmup": _WARM}, timeout_s=self.left_s())
        losses = [each["losses"] for each in built]
        if any(each != losses[0] for each in losses):
            raise ArmError("the ranks, which have equal batches, have other losses")
        kept = {key: built[0][key] for key in ("losses", "first_step_s", "warm_step_s")}
        return {**kept, **built[0]["said"]}

    def _alone(self, name: str, **more: Any) -> Found:
        command = [sys.executable, str(_HERE / "alone.py"), name]
        done = subprocess.run(
            [*command, json.dumps({"device": self.options.device, **more})],
            capture_output=True,
            text=True,
            timeout=self.left_s(),
            check=False,
            env={**os.environ, **self._environment},
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise ArmError(next((s for s in reversed(lines) if "Error" in s), lines[-1]))
        found: Found = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def _close(groups: Any) -> None:
    for group in groups:
        group.close()


def _verdicts(found: Mapping[str, Any]) -> list[str]:
    """Judge what was measured by what is promised."""
    checks: list[tuple[str, bool]] = []
    for name in sorted({"plan", "budget"} & found.keys()):
        each = found[name]
        checks.append(
            (
                f"peak of {name} within 0.5 %: {each['peak_off']:+.2%}",
                abs(each["peak_off"]) <= 0.005,
            )
        )
        checks.append(
            (
                f"step of {name} within 10 %: {each['seconds_off']:+.1%}",
                abs(each["seconds_off"]) <= 0.1,
            )
        )
    for name, each in found.get("offloads", {}).items():
        checks.append((f"weights with {name} on the host equal to the bit", each["is_equal"]))
    if "ranks" in found:
        off = found["ranks"]["losses_off"]
        checks.append((f"losses of two ranks on one device within 0.1 %: {off:.3%}", off <= 1e-3))
    for n, each in found.get("serving", {}).get("batches", {}).items():
        off = each["torchloom_difference"]
        checks.append((f"served batch of {n} within 2 % of the model: {off:.2%}", off <= 0.02))
    return [f"{'ok  ' if holds else 'FAIL'} {text}" for text, holds in checks]


PARTS: dict[str, Callable[[Bench], Found]] = {
    "calibrate": Bench.calibrate,
    "plan": Bench.plan,
    "budget": Bench.budget,
    "peers": Bench.peers,
    "offloads": Bench.offloads,
    "serving": Bench.serving,
    "ranks": Bench.ranks,
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    recorded = {name: value for name, value in vars(options).items() if name not in ("out", "logs")}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        report: dict[str, Any] = {
            "environment": snapshot(recorded, {}),
            "device": _device(options.device),
            "parts": bench.found,
            "failed": {},
            "seconds": {},
        }
        for name in options.parts:
            begun = time.monotonic()
            try:
                if bench.left_s() < 5:
                    raise ArmError("no time left")
                bench.found[name] = PARTS[name](bench)
            except (
                ArmError,
                KeyError,
                TypeError,
                ZeroDivisionError,
                subprocess.TimeoutExpired,
            ) as error:
                report["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
            report["seconds"][name] = time.monotonic() - begun
            report["verdicts"] = _verdicts(bench.found)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(
                f"{name:<10} {report['seconds'][name]:6.1f} s  {report['failed'].get(name, 'done')}",
                flush=True,
            )
        if report["failed"] and options.logs:
            _copy_logs(Path(folder), options.logs)
    print("\n".join(report["verdicts"]))
    return 1 if report["failed"] else 0


def _copy_logs(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        (target / log.name).write_bytes(log.read_bytes())


def _device(name: str) -> dict[str, Any]:
    """Describe the device, in a process of its own: this one must hold no memory there."""
    ask = (
        "import json, torch; on_gpu = torch.cuda.is_available(); "
        "facts = torch.cuda.get_device_properties(0) if on_gpu else None; "
        "print(json.dumps({'name': facts.name if on_gpu else 'cpu', 'torch': torch.__version__, "
        "'memory_bytes': facts.total_memory if on_gpu else None, 'cuda': torch.version.cuda}))"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "asked_for": name}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", type=lambda text: text.split(","), default=list(PARTS), help=", ".join(PARTS))
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--quick", action="store_true", help="a model of two layers, to try the harness")
    add("--backend", default="inductor")
    add("--minutes", type=float, default=9.5, help="for all parts")
    add("--logs", type=Path, help="where logs of ranks are kept if a part fails")
    add("--out", type=Path, default=_HERE.parent / "out" / "gpu.json")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
