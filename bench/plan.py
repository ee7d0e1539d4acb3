"""How long planning takes for a large decoder, and how far its plans can be from the best.

    python bench/plan.py                    80 layers of the size of a 70 B model, 4096 tokens
    python bench/plan.py --layers 8         the same, shallow

No memory of that size is needed: the model is made of fake tensors, and planning runs nothing. Times of
operators are modelled (`--device` names a row of torchloom.costs.hardware).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from _environment import snapshot
from torchloom._torch import aot as torch_partition
from torchloom.capture import WeaveHooks, compile_with_aot
from torchloom.costs import CostTable, device_row, node_us
from torchloom.graph import droppable
from torchloom.memory.joint import joint_model
from torchloom.plan.form import num_simulations
from torchloom.plan.frontier import Frontier, frontier
from torchloom.recipes.train.model import Llama, LlamaConfig

SHARES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Budgets: parts of the way from the least peak to that of no recomputation."""


class _CapturedError(Exception):
    """Ends the compile once the joint graph is there."""


def joint_of(layers: int, seq_len: int) -> tuple[fx.Graph, int]:
    """Capture the joint graph of a decoder of fake tensors; return it and its number of results."""
    found: list[tuple[fx.Graph, int]] = []

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append((torch_partition.prepare_joint(joint).graph, num_fwd_outputs))
        raise _CapturedError

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        nothing = lambda gm, kind: None  # noqa: E731
        hooks = WeaveHooks(joint=nothing, lowered=nothing, key=None, partition=split)
        return compile_with_aot(gm, inputs, hooks)

    config = LlamaConfig(
        vocab_size=128_256,
        dim=8192,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=28_672,
        max_seq_len=seq_len,
    )
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Llama(config)
        ids = torch.randint(0, 100, (1, seq_len))
        try:
            torch.compile(model, backend=backend, fullgraph=True)(ids, ids)
        except Exception:
            if not found:
                raise
    return found[0]


def solve(graph: fx.Graph, num_results: int, table: CostTable) -> tuple[Frontier, float, float]:
    """Return the frontier, the time of everything in microseconds, and the seconds of the search."""
    model = joint_model(graph, num_results)
    may_drop = droppable(graph)
    indices = {i for i, node in enumerate(model.nodes) if node in may_drop}
    costs = [
        0.0 if is_input else node_us(node, table)
        for node, is_input in zip(model.nodes, model.is_input, strict=True)
    ]
    started = time.perf_counter()
    found = frontier(model, indices, costs, max_simulations=num_simulations(len(model.nodes)))
    return found, sum(costs), time.perf_counter() - started


def points(found: Frontier, total_us: float) -> list[dict[str, float]]:
    """Return what the frontier gives at several budgets."""
    least, most = found.min_peak_bytes, found.points[0].peak_bytes
    rows = []
    for share in SHARES:
        budget = int(least + share * (most - least))
        point = found.within(budget)
        assert point is not None
        bound_us = min(found.bound_us(budget), point.extra_us)
        rows.append(
            {
                "budget_bytes": budget,
                "peak_bytes": point.peak_bytes,
                "extra_us": point.extra_us,
                "bound_us": bound_us,
                "gap": (point.extra_us - bound_us) / (total_us + bound_us),
            }
        )
    return rows


def main() -> None:
    """Capture once, search several times, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--device", default="h100-80gb", help="whose times are modelled")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()

    options = {name: value for name, value in vars(args).items() if name != "out"}
    started = time.perf_counter()
    graph, num_results = joint_of(args.layers, args.seq_len)
    traced_s = time.perf_counter() - started
    table = CostTable(device=device_row(args.device))
    runs = [solve(graph, num_results, table) for _ in range(args.repeats)]
    found, total_us, _ = runs[0]
    seconds = [run[2] for run in runs]
    rows = points(found, total_us)
    print(f"{args.layers} layers, {len(graph.nodes)} nodes, captured in {traced_s:.1f} s")
    print(
        f"solved in {statistics.median(seconds):.2f} s [{min(seconds):.2f}-{max(seconds):.2f}], "
        f"{found.num_tried} plans simulated, {len(found.points)} kept"
    )
    for row in rows:
        print(
            f"  budget {row['budget_bytes'] / 1e9:7.2f} GB  peak {row['peak_bytes'] / 1e9:7.2f} GB  "
            f"again {row['extra_us'] / 1e3:8.2f} ms  bound {row['bound_us'] / 1e3:8.2f} ms  "
            f"gap {row['gap']:.2%}"
        )
    kept = "kept" if max(seconds) <= 5 and all(row["gap"] <= 0.02 for row in rows) else "BROKEN"
    print(f"at most 5 s of solving, gap at most 2 %: {kept}")
    if args.out:
        record = {
            "environment": snapshot(options, {}),
            "layers": args.layers,
            "nodes": len(graph.nodes),
            "seq_len": args.seq_len,
            "device_modelled": args.device,
            "compute_us": total_us,
            "solve_s": seconds,
            "num_simulated": found.num_tried,
            "points": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
