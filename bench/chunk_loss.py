"""Time and memory of a loss behind a large vocabulary: all logits, chunks of them, and peers' ways to chunk.

    python bench/chunk_loss.py --out bench/out/chunk-loss-cpu.json

Part one times forward and backward of one linear head with its loss, in turns, in one process of one thread. Ratios are to
all logits under Inductor, within a round. Part two trains the same head by an engine under budgets, and compares the peak
that was planned with the one that torch's allocator saw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchloom
from _environment import snapshot
from torchloom.errors import PlanError
from torchloom.memory import measure_peak
from torchloom.passes import PASSES

CHUNKS = 8
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def all_logits(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The loss as transformers writes it."""
    return F.cross_entropy(F.linear(h, w).float(), y)


def torchs(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """torch's own operator, with the chunks that it chooses."""
    return F.linear_cross_entropy(h, w, y, options=nn.LinearCrossEntropyOptions())


def in_a_loop(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """A loop with a backward pass for each chunk, which is what wrappers around a loss do; gradients are left in place."""
    parts, total = h.detach().requires_grad_(), h.new_zeros((), dtype=torch.float32)
    for x, labels in zip(parts.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        loss = F.cross_entropy(F.linear(x, w).float(), labels, reduction="sum") / len(y)
        loss.backward()
        total += loss.detach()
    h.grad = parts.grad
    return total.requires_grad_()


def chunked(rows: int, vocabulary: int, lowering: str) -> Loss:
    """Return the loss through torchloom's pass, in `CHUNKS` parts."""
    chunk = PASSES["chunk_loss"].with_options(chunk_bytes=rows * vocabulary * 4 // CHUNKS)
    options = {"lowering": lowering, "passes": [chunk], "strict": True}
    return torch.compile(all_logits, backend="torchloom", options=options)


def step(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> None:
    h.grad = w.grad = None
    loss(h, w, y).backward()


def compare(rows: int, width: int, vocabulary: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds, ratios and peaks of all ways."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    h = torch.randn(rows, width, dtype=DTYPES[dtype], requires_grad=True)
    w = (0.02 * torch.randn(vocabulary, width)).to(DTYPES[dtype]).requires_grad_()
    y = torch.randint(0, vocabulary, (rows,))
    ways: dict[str, Loss] = {
        "all logits, Inductor": torch.compile(all_logits),
        "all logits, eager": all_logits,
        "chunk_loss, Inductor": chunked(rows, vocabulary, "inductor"),
        "chunk_loss, aot_eager": chunked(rows, vocabulary, "aot_eager"),
        "linear_cross_entropy": torchs,
        "loop of backwards": in_a_loop,
    }
    peaks, times = {}, {name: [] for name in ways}
    for name, loss in ways.items():
        step(loss, h, w, y)
        h.grad = w.grad = None
        peaks[name] = measure_peak(lambda loss=loss: step(loss, h, w, y)).peak_bytes
    for _ in range(rounds):
        for name, loss in ways.items():
            began = time.process_time()  # of one thread: what others take does not count
            step(loss, h, w, y)
            times[name].append(time.process_time() - began)
    first = times["all logits, Inductor"]
    return {
        name: {
            "ms": 1e3 * statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, first, strict=True)),
            "peak_bytes": peaks[name],
        }
        for name, taken in times.items()
    }


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(width, width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(x).relu()).float(), y)


def planned(rows: int, width: int, vocabulary: int, key: str, budget: int) -> dict[str, Any]:
    """Train the head within a budget; return the planned and the measured peak of forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "compile": {"strict": True, "memory_budget": budget, "chunk_loss": key},
        "steps_per_print": float("inf"),
    }
    engine, *_ = torchloom.initialize(model=Head(width, vocabulary), config=config)
    engine.compile()
    x, y = torch.randn(rows, width), torch.randint(0, vocabulary, (rows,))
    for _ in range(2):
        engine.backward(engine(x, y))
        engine.step()
    plan = engine.plan()
    (graph,) = plan.graphs
    measured = measure_peak(lambda: engine.backward(engine(x, y))).peak_bytes
    return {
        "rows_at_a_time": graph.loss_rows[0] if graph.loss_rows else None,
        "planned_bytes": graph.peak_bytes,
        "measured_bytes": measured,
        "beside_bytes": plan.peak_bytes - graph.peak_bytes,
    }


def budgets(rows: int, width: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return the peaks of all logits, and of what plans choose with all memory, half and a quarter of theirs."""
    found = [planned(rows, width, vocabulary, key, 1 << 40) for key in ("never", "auto")]
    for share in (0.5, 0.25):
        budget = found[0]["beside_bytes"] + int(share * found[0]["planned_bytes"])
        try:
            found.append(planned(rows, width, vocabulary, "auto", budget))
        except PlanError:
            break
    return found


def main(args: Sequence[str]) -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("bench/out/chunk-loss-cpu.json"))
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "environment": snapshot({**vars(options), "out": ""}, {}),
        "times": {},
        "peaks": {},
    }
    for vocabulary in options.vocabularies:
        for dtype in DTYPES:
            found = compare(options.rows, options.width, vocabulary, dtype, options.rounds)
            record["times"][f"{vocabulary} {dtype}"] = found
            for name, each in found.items():
                print(
                    f"{vocabulary:7} {dtype} {name:22} {each['ms']:8.1f} ms  {each['ratio']:5.2f}  "
                    f"{each['peak_bytes'] / 2**20:7.1f} MiB",
                    flush=True,
                )
        record["peaks"][vocabulary] = budgets(options.rows, options.width, vocabulary)
        for each in record["peaks"][vocabulary]:
            print(
                f"{vocabulary:7} rows at a time {each['rows_at_a_time'] or 'all logits':>10}: planned "
                f"{each['planned_bytes'] / 2**20:7.1f} MiB, measured {each['measured_bytes'] / 2**20:7.1f} MiB",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
