"""Compile time against depth: a decoder of 2 to 64 equal layers, from `compile()` to the end of the first step.

    python bench/depth.py                             all arms and depths
    python bench/depth.py --arms loom,fsdp2-block --layers 2,32

Each figure is of one fresh process per rank, cold with empty caches or warm with what the cold run left. CPU seconds are
those of Python, without the compilers of C++, which are other processes; wall time has them. Then torchloom's two ways
train side by side in one process, step by step in turn, for the ratio of their step times. Writes `depth.json` and
`depth.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _environment import snapshot, worker_environment
from _ranks import ask_ranks

_HERE = Path(__file__).parent
RANKS = 2
_NO_BOUND = 10**15
SHAPE = {"dim": 64, "num_heads": 4, "hidden_dim": 176, "vocab_size": 512, "seq_len": 64}
"""Compile time does not depend on widths. All weights are sharded."""
STEP_SHAPE = {"dim": 256, "num_heads": 8, "hidden_dim": 704, "vocab_size": 2048, "seq_len": 128}
_LOOM = {"stage": 3, "persistence_threshold": 0}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "loom": ("arms.loom", _LOOM),
    "loom-budget": ("arms.loom", _LOOM),
    "loom-flat": ("arms.loom", {**_LOOM, "regions": False}),
    "fsdp2-block": ("arms.fsdp2", {"compiled": "block"}),
    "plain": ("arms.limit", {"compiled": True}),
}
LABELS = {
    "loom": "torchloom stage 3, equal layers compiled once",
    "loom-budget": "the same under a memory budget that binds",
    "loom-flat": "torchloom stage 3, regions: false",
    "fsdp2-block": "FSDP2, each block compiled",
    "plain": "torch.compile, one process, not sharded",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    if options.worker:
        return _work(json.loads(options.worker))
    starts = list(_starts(options))
    pairs = (
        [] if options.no_steps else _run({"do": "pair", "layers": 8, "steps": options.steps}, None)
    )
    environment = worker_environment(_HERE)
    record = {
        "environment": snapshot({"shape": SHAPE, "ranks": RANKS}, environment),
        "starts": starts,
        "pair": pairs[0] if pairs else None,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "depth.json").write_text(json.dumps(record, indent=1) + "\n")
    _tell(starts, record["pair"])
    _draw(starts, options.out / "depth.svg")
    return 0


def _starts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for repeat in range(options.repeats):
        for layers in options.layers:
            for arm in options.arms:
                if arm in ("loom-flat", "plain") and layers > options.flat_layers:
                    continue
                with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
                    budget = _binding_budget(layers) if arm == "loom-budget" else None
                    for kind in ("cold", "warm"):
                        spec = {"do": "start", "arm": arm, "layers": layers, "budget": budget}
                        ranks = _run(spec, Path(cache))
                        found = {
                            "arm": arm,
                            "layers": layers,
                            "cache": kind,
                            "repeat": repeat,
                            "cpu_s": max(each["cpu_s"] for each in ranks),
                            "wall_s": max(each["wall_s"] for each in ranks),
                            "loss": ranks[0]["loss"],
                            "facts": ranks[0]["facts"],
                        }
                        print(
                            f"{arm:12} {layers:3} layers {kind}: {found['cpu_s']:.1f} s of CPU, "
                            f"{found['wall_s']:.1f} s",
                            flush=True,
                        )
                        yield found


def _binding_budget(layers: int) -> int:
    """Return a budget in bytes that leaves two thirds of what forward and backward of a decoder would take."""
    spec = {"do": "start", "arm": "loom-budget", "layers": layers, "budget": _NO_BOUND}
    (facts, *_) = [each["facts"] for each in _run({**spec, "backend": "aot_eager"}, None)]
    base, peak = facts["base_bytes"], facts["peak_bytes"]
    return int(base + 2 * (peak - base) / 3)


def _run(spec: Mapping[str, Any], cache: Path | None) -> list[dict[str, Any]]:
    """Run one process for each rank; return what they answer."""
    ranks = 1 if spec.get("arm") == "plain" else RANKS
    return ask_ranks(
        __file__,
        ["--worker", json.dumps(spec)],
        ranks=ranks,
        cache=cache or _HERE.parent / ".cache" / "bench",
        timeout_s=1200,
        quiet=True,
    )


def _work(spec: Mapping[str, Any]) -> int:
    import torch

    from _data import batches, read_corpus
    from _model import Shape

    torch.set_num_threads(1)
    sizes = SHAPE if spec["do"] == "start" else STEP_SHAPE
    shape = Shape(num_layers=spec["layers"], **sizes)
    rank = int(os.environ["RANK"])
    data = batches(read_corpus(), batch=2, seq_len=shape.seq_len, rank=rank)
    work: Callable[..., dict[str, Any]] = _start if spec["do"] == "start" else _pair
    print(json.dumps(work(spec, shape, rank, data)))
    torch.distributed.destroy_process_group()
    return 0


def _trainee(arm: str, shape: Any, rank: int, **more: Any) -> Any:
    from importlib import import_module

    from _model import build_model
    from arms.base import Job

    module, options = ARMS[arm]
    job = Job(model=lambda: build_model(shape), rank=rank, world_size=RANKS, batch=2)
    trainee = import_module(module).build(job, **options, **more)
    import_module("torch._inductor.compile_fx")  # not what is timed
    return trainee


def _start(spec: Mapping[str, Any], shape: Any, rank: int, data: Any) -> dict[str, Any]:
    more = {"memory_budget": spec["budget"]} if spec["budget"] else {}
    if "backend" in spec:
        more["backend"] = spec["backend"]
    trainee = _trainee(spec["arm"], shape, rank, **more)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu, wall = usage.ru_utime + usage.ru_stime, time.perf_counter()
    trainee.compile()
    loss = trainee.step(*next(data)).item()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime - cpu,
        "wall_s": time.perf_counter() - wall,
        "loss": loss,
        "facts": dict(trainee.facts()),
    }


def _pair(spec: Mapping[str, Any], shape: Any, rank: int, data: Any) -> dict[str, Any]:
    """Take steps of the two ways of torchloom in turn; return ratios of their times."""
    trainees = {arm: _trainee(arm, shape, rank) for arm in ("loom", "loom-flat")}
    for trainee in trainees.values():
        trainee.compile()
    losses: dict[str, list[float]] = {arm: [] for arm in trainees}
    ratios = []
    for step in range(spec["steps"] + 3):
        batch, times = next(data), {}
        for arm in sorted(trainees, reverse=bool(step % 2)):
            started = time.perf_counter()
            losses[arm].append(trainees[arm].step(*batch).item())
            times[arm] = time.perf_counter() - started
        if step >= 3:
            ratios.append(times["loom"] / times["loom-flat"])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "step_ratio": quartiles,
        "steps": len(ratios),
        "losses": {a: x[:5] for a, x in losses.items()},
    }


def _tell(starts: Sequence[Mapping[str, Any]], pair: Mapping[str, Any] | None) -> None:
    for arm in dict.fromkeys(each["arm"] for each in starts):
        for kind in ("cold", "warm"):
            found = _medians(starts, arm, kind)
            text = ", ".join(
                f"{layers}: {cpu:.1f} / {wall:.1f}" for layers, (cpu, wall) in found.items()
            )
            print(f"{LABELS[arm]}, {kind}, CPU s / wall s by layers: {text}")
            if len(found) > 1:
                (low, (first, _)), (high, (last, _)) = min(found.items()), max(found.items())
                print(f"    per added layer {(last - first) / (high - low):.3f} s of CPU")
    if pair:
        low, middle, high = pair["step_ratio"]
        print(
            f"step time, equal layers compiled once against flat: {middle:.3f} [{low:.3f}-{high:.3f}]"
        )


def _medians(
    starts: Sequence[Mapping[str, Any]], arm: str, kind: str
) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    of_arm = [each for each in starts if (each["arm"], each["cache"]) == (arm, kind)]
    for layers in sorted({each["layers"] for each in of_arm}):
        same = [each for each in of_arm if each["layers"] == layers]
        found[layers] = (
            statistics.median(each["cpu_s"] for each in same),
            statistics.median(each["wall_s"] for each in same),
        )
    return found


def _draw(starts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw wall time against depth, cold."""
    lines = {
        LABELS[arm]: {layers: wall for layers, (_, wall) in _medians(starts, arm, "cold").items()}
        for arm in dict.fromkeys(each["arm"] for each in starts)
    }
    most_x = max(layers for line in lines.values() for layers in line)
    most_y = max(wall for line in lines.values() for wall in line.values())
    colors = ("#1b6ca8", "#9a9a9a", "#c8553d", "#6b8e23")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 420" font-family="sans-serif" font-size="13">',
        '<rect width="720" height="420" fill="white"/>',
        '<text x="60" y="24" font-size="15">First step, empty caches: seconds against layers</text>',
        '<path d="M60 360 H690 M60 360 V50" stroke="#444" fill="none"/>',
    ]

    def at(layers: float, wall: float) -> str:
        return f"{60 + 620 * layers / most_x:.0f} {360 - 300 * wall / most_y:.0f}"

    for tick in sorted({layers for line in lines.values() for layers in line}):
        x = at(tick, 0).split()[0]
        parts.append(f'<text x="{x}" y="380" text-anchor="middle">{tick}</text>')
    for part in range(5):
        y = 360 - 75 * part
        parts.append(f'<text x="52" y="{y + 4}" text-anchor="end">{most_y * part / 4:.0f}</text>')
    for number, ((label, line), color) in enumerate(zip(lines.items(), colors, strict=False)):
        path_text = " L".join(at(layers, wall) for layers, wall in sorted(line.items()))
        parts.append(f'<path d="M{path_text}" stroke="{color}" stroke-width="2" fill="none"/>')
        for layers, wall in line.items():
            x, y = at(layers, wall).split()
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
        parts.append(f'<text x="80" y="{60 + 18 * number}" fill="{color}">{label}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="bench/depth.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", type=names, default=list(ARMS))
    parser.add_argument("--layers", type=numbers, default=[2, 8, 32, 64])
    parser.add_argument("--flat-layers", type=int, default=32, help="deepest flat compile")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="of each way, for the ratio")
    parser.add_argument("--no-steps", action="store_true", help="compile times alone")
    parser.add_argument("--out", type=Path, default=_HERE / "out", help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
