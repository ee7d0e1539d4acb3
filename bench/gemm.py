"""fp32 matrix products of the benchmark's model: torch's own library beside oneDNN, one thread.

    python bench/gemm.py                                     as torch is set up here
    MKL_ENABLE_INSTRUCTIONS=AVX2 python bench/gemm.py        MKL as on a processor that it knows less

For each linear layer: forward `x @ w.T`, and the two products of backward, `g @ w` and `g.T @ x`.
Both libraries run in turns; printed is GFLOP/s of the fastest run, and of the median one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from torchloom.ops.compute import DEFAULT_KERNEL, KERNELS, Product
from torchloom.plan.costs import available_kernels
from torchloom.plan.costs.kernels import call_of

LAYERS = {"attention": (512, 512), "up": (512, 1408), "down": (1408, 512), "head": (512, 8192)}
"""(in, out) of the linear layers."""
TOKENS = (1024, 256)


def main(repeats: int = 15) -> int:
    """Print the table; return the exit status."""
    torch.set_num_threads(1)
    if not available_kernels():
        print("this torch has no oneDNN: there is nothing to compare")
        return 1
    names = (DEFAULT_KERNEL, *KERNELS)
    print(f"{'tokens':>6}  {'layer':<10}{'product':<10}" + "".join(f"{n:>18}" for n in names))
    for tokens in TOKENS:
        for layer, (width, out) in LAYERS.items():
            for kind, product in _products(tokens, width, out).items():
                cells = _rates(product, names, repeats)
                print(f"{tokens:>6}  {layer:<10}{kind:<10}" + "".join(f"{c:>18}" for c in cells))
    return 0


def _products(tokens: int, width: int, out: int) -> dict[str, Product]:
    return {
        "x @ w.T": Product(tokens, width, out, "n", "t", False),
        "g @ w": Product(tokens, out, width, "n", "n", False),
        "g.T @ x": Product(out, tokens, width, "t", "n", False),
    }


def _rates(product: Product, names: Sequence[str], repeats: int) -> list[str]:
    """Return "fastest (median)" GFLOP/s for each implementation."""
    calls = {name: call_of(product, name) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(repeats + 2):
        for name, call in calls.items():
            seconds = _timed(call)
            if index >= 2:
                samples[name].append(seconds)
    gflop = 2e-9 * product.m * product.k * product.n
    return [
        f"{gflop / min(found):.0f} ({gflop / statistics.median(found):.0f})"
        for found in samples.values()
    ]


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
