"""What `run.py` measures without training, each in a process of its own: `alone.py NAME '{"device": ..., ...}'` prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from _model import Block, Shape, angles_of

BATCHES = (1, 8, 64)


def calibrate(device: str, *, quick: bool, **_: Any) -> dict[str, Any]:
    """Measure the device and keep its row where later processes find it."""
    from torchloom.costs import CostTable, calibrate_device, save_table

    row, figures = calibrate_device(torch.device(device), quick)
    save_table(CostTable(device=row), device)
    return {**asdict(row), **figures, "host_triad_bytes_per_s": _host_triad(quick)}


def _host_triad(quick: bool) -> float:
    """Return the bytes per second of a = b + s c in host memory (McCalpin's STREAM)."""
    b, c = (torch.rand((1 if quick else 64) << 20) for _ in range(2))
    a = torch.empty_like(b)
    seconds = _median_s({"triad": lambda: torch.add(b, c, alpha=3.0, out=a)}, 7, "cpu")["triad"]
    return 3 * a.numel() * 4 / seconds


class Layers(torch.nn.Module):
    """Decoder layers over hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        angles = angles_of(shape.seq_len, shape.dim // shape.num_heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def serving(device: str, *, shape: dict[str, int], backend: str, **_: Any) -> dict[str, Any]:
    """Time a served model with recorded sizes beside `mode="reduce-overhead"`, call by call in turns."""
    from torchloom.serve import Contract, Dim, build, tensor

    torch.manual_seed(0)
    sizes = Shape(**shape)
    model = Layers(sizes).to(device, torch.bfloat16).eval().requires_grad_(False)
    batch = Dim("batch", 1, max(BATCHES))
    hidden = (sizes.seq_len, sizes.dim)
    on_gpu = device == "cuda"
    place = torch.device(device, 0) if on_gpu else torch.device(device)
    contract = Contract({"x": tensor(batch, *hidden, dtype=torch.bfloat16, device=place)})
    begun = time.perf_counter()
    program = build(
        model,
        contract,
        sizes=list(BATCHES),
        backend=backend,
        cuda_graphs="full" if on_gpu else "off",
    )
    program.warm_up()
    built_s = time.perf_counter() - begun
    begun = time.perf_counter()
    mode: dict[str, Any] = {"mode": "reduce-overhead"} if on_gpu else {"backend": backend}
    peer = torch.compile(model, dynamic=False, **mode)
    found: dict[str, Any] = {"build_s": built_s, "batches": {}}
    with torch.no_grad():
        inputs = {n: torch.randn(n, *hidden, dtype=torch.bfloat16, device=place) for n in BATCHES}
        for x in inputs.values():
            for _ in range(3):
                peer(x)
        found["reduce_overhead_build_s"] = time.perf_counter() - begun
        for n, x in inputs.items():
            wanted = model(x)
            calls = {"torchloom": lambda x=x: program(x), "reduce_overhead": lambda x=x: peer(x)}
            found["batches"][n] = {
                **{f"{name}_s": s for name, s in _median_s(calls, 25, device).items()},
                **{
                    f"{name}_difference": _difference(call(), wanted)
                    for name, call in calls.items()
                },
            }
    return found


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def _median_s(
    calls: dict[str, Callable[[], object]], num_calls: int, device: str
) -> dict[str, float]:
    """Return the median seconds of each of several calls, made in turns and waited for."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_calls):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Run one of them, on options in JSON."""
    options = json.loads(sys.argv[2])
    found = {"calibrate": calibrate, "serving": serving}[sys.argv[1]](**options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
