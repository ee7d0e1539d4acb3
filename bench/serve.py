"""torchloom's serving beside torch.compile's ways to serve every batch size, in one run.

    python bench/serve.py                 all arms
    python bench/serve.py --quick         two layers, few rounds

Each arm is a process of its own that answers questions, so that all take turns. Asked of each, on a decoder of
8 layers (width 512, 16 tokens a row): how many programs it compiles for batches 1 to 64 in random order; how many
results are wrong; seconds from `import torch` done to the first result, cold and then in a new process with
what the arm keeps; seconds of a call at batch 1, 8 and 64; and what a call costs beyond its kernels, on a model
of 40 small linear layers. Writes `serve.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _environment import snapshot, worker_environment
from _stats import summarize

_HERE = Path(__file__).parent
_ARMS = ("default", "dynamic", "mark_dynamic", "mark_unbacked", "aot_compile", "torchloom")
_REFERENCE = "exact"
"""A compile for each size that is timed: the best that a size can have."""
_BATCHES = (1, 8, 64)
_NUM_WARM = 3
"""New processes behind a warm start: other work on the machine disturbs single ones."""


class Arm:
    """A process that serves one way."""

    def __init__(self, name: str, folder: Path, num_layers: int) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            str(_HERE / "_serve_worker.py"),
            name,
            str(folder),
            str(num_layers),
        ]
        self._process = subprocess.Popen(
            command,
            env={**_base_environment(), **worker_environment(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("a"),
            text=True,
        )

    def ask(self, **question: Any) -> Any:
        """Send a question and return the answer.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its log says why")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _base_environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, write JSON; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two layers, few rounds")
    parser.add_argument("--rounds", type=int, help="rounds of timed calls (default: 30)")
    parser.add_argument("--arms", help=f"comma-separated, of {', '.join(_ARMS)}")
    parser.add_argument("--out", type=Path, default=_HERE / "out", help="folder for results")
    parser.add_argument(
        "--only-added", action="store_true", help="only what a call costs beyond its kernels"
    )
    options = parser.parse_args(arguments)
    rounds = options.rounds or (5 if options.quick else 30)
    num_layers = 2 if options.quick else 8
    names = options.arms.split(",") if options.arms else list(_ARMS)
    options.out.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="serve", dir=options.out))
    found: dict[str, Any] = {}
    timed: dict[str, Any] = {}
    try:
        if options.only_added:
            arms = [Arm(name, root / name, num_layers) for name in names]
        else:
            found, arms = _starts(names, root, num_layers)
            timed = _calls(arms, rounds)
        added = _added(arms, rounds)
        for arm in arms:
            arm.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    lines = _lines(found, timed, added) if found else []
    lines += [f"{name:14s} adds {value * 1e6:6.1f} us to a call" for name, value in added.items()]
    verdicts = _verdicts(found, timed, added) if "torchloom" in names else []
    environment = snapshot({"rounds": rounds, "layers": num_layers}, worker_environment(Path()))
    result = {
        "environment": environment,
        "arms": found,
        "calls": timed,
        "added": added,
        "verdicts": verdicts,
    }
    (options.out / "serve.json").write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([*lines, *verdicts]))
    return int(any(" BROKEN " in verdict for verdict in verdicts))


def _starts(names: Sequence[str], root: Path, num_layers: int) -> tuple[dict[str, Any], list[Arm]]:
    """Start each arm cold, warm and afresh; return what was seen and the arms that run."""
    found: dict[str, Any] = {}
    arms: list[Arm] = []
    for name in names:
        _say(f"{name}: cold start")
        arm = Arm(name, root / name, num_layers)
        row = {"cold_s": arm.ask(do="start")}
        arm.close()
        warm = []
        for number in range(_NUM_WARM):
            _say(f"{name}: warm start {number + 1}")
            arm = Arm(name, root / name, num_layers)
            warm.append(arm.ask(do="start"))
            arm.close()
        row |= {"warm_s": median(warm), "warm_starts_s": warm}
        _say(f"{name}: batches 1 to 64 in random order")
        arm = Arm(name, root / f"{name}-fresh", num_layers)
        arm.ask(do="start")
        row |= arm.ask(do="sweep")
        found[name] = row
        arms.append(arm)
    reference = Arm(_REFERENCE, root / _REFERENCE, num_layers)
    reference.ask(do="start")
    return found, [*arms, reference]


def _calls(arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
    """Time calls, in turns; return seconds and ratios to the reference by arm and batch."""
    samples: dict[str, dict[str, list[float]]] = {arm.name: {} for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 else arms[::-1]:
            for batch in _BATCHES:
                seconds = arm.ask(do="time", batch=batch)
                samples[arm.name].setdefault(str(batch), []).append(seconds)
    return {
        name: {
            batch: {
                "seconds": median(values),
                "ratio": asdict_quartiles(values, samples[_REFERENCE][batch]),
            }
            for batch, values in by_batch.items()
        }
        for name, by_batch in samples.items()
    }


def _added(arms: Sequence[Arm], rounds: int) -> dict[str, float]:
    """Return the seconds of the processor that a call costs beyond its generated code, by arm."""
    for arm in arms:
        _say(f"{arm.name}: the small model")
        arm.ask(do="small")
    more: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            whole, kernels = arm.ask(do="time small")
            more[arm.name].append(whole - kernels)
    return {name: median(values) for name, values in more.items()}


def asdict_quartiles(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return quartiles of ratios within rounds."""
    ratios = [one / other for one, other in zip(values, others, strict=True)]
    return summarize(ratios)._asdict()


def _lines(found: dict[str, Any], timed: dict[str, Any], added: dict[str, float]) -> list[str]:
    lines = [
        f"{'':14s} {'compiles':>8s} {'wrong':>6s} {'cold s':>7s} {'warm s':>7s}"
        + "".join(f" {'batch ' + str(batch):>22s}" for batch in _BATCHES)
        + f" {'added us':>9s}"
    ]
    for name, row in found.items():
        calls = "".join(_call(timed[name][str(batch)]) for batch in _BATCHES)
        lines.append(
            f"{name:14s} {row['compiles']:8d} {row['wrong']:6d} {row['cold_s']:7.2f} {row['warm_s']:7.2f}"
            f"{calls} {added[name] * 1e6:9.1f}"
        )
    return lines


def _call(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return f" {row['seconds'] * 1e3:6.2f} ms {ratio['median']:5.3f} [{ratio['low']:.2f}-{ratio['high']:.2f}]"[
        :24
    ]


def _verdicts(found: dict[str, Any], timed: dict[str, Any], added: dict[str, float]) -> list[str]:
    told = _promises(found, timed) if found else []
    if "default" in added:
        share = added["torchloom"] / added["default"]
        told.append(
            ("added", share <= 0.3, f"{share:.2f} of torch.compile's cost per call (at most 0.3)")
        )
    return [
        f"{'kept  ' if kept else 'BROKEN'} {name}: {text}".replace("BROKEN", " BROKEN ")
        for name, kept, text in told
    ]


def _promises(found: dict[str, Any], timed: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Return promises about starts and calls: a name, whether it is kept, and the figures."""
    ours = found["torchloom"]
    others = {name: row for name, row in found.items() if name != "torchloom"}
    told: list[tuple[str, bool, str]] = [
        (
            "compiles",
            ours["compiles"] == ours["announced"],
            f"{ours['compiles']} for 64 batch sizes, {ours['announced']} announced before the first call",
        ),
        ("results", ours["wrong"] == 0, f"{ours['wrong']} wrong"),
    ]
    if others:
        best = min(row["warm_s"] for row in others.values())
        told.append(
            ("warm", ours["warm_s"] < best, f"{ours['warm_s']:.2f} s, the best other {best:.2f} s")
        )
    told.append(
        ("warm", ours["warm_s"] < 1.0, f"{ours['warm_s']:.2f} s beyond importing torch (below 1)")
    )
    for batch in _BATCHES:
        ratio = timed["torchloom"][str(batch)]["ratio"]
        told.append(
            (
                f"batch {batch}",
                ratio["median"] <= 1.02,
                f"{ratio['median']:.3f} [{ratio['low']:.3f}-{ratio['high']:.3f}] of a compile for this size "
                "(at most 1.02)",
            )
        )
    return told


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN:6.0f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
