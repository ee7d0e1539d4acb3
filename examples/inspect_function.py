"""Look inside torch.compile: entries, guards, a graph break, a recompile, in a record and a page.

    python examples/inspect_function.py [--out runs/inspect]

The function branches on data, so its graph breaks there. An input of a second size adds a second,
dynamic entry to each of the two parts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import torchloom


def modified_sigmoid(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Squash x, scale it down where it is large, and weigh y with it."""
    x = 1.0 / (torch.exp(-inputs["x"]) + 5)
    if x.mean() > 0.5:
        x = x / 1.1
    return x * inputs["y"]


def arguments(size: int) -> dict[str, torch.Tensor]:
    """Return two random vectors that require gradients."""
    return {name: torch.randn(size, requires_grad=True) for name in ("x", "y")}


def main() -> None:
    """Compile, watch, and ask about calls that have not been made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/inspect"))
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    compiled = torch.compile(modified_sigmoid, backend=options.backend)
    with torchloom.watch(options.out) as watch:
        for size in (10, 8, 10):
            compiled(arguments(size)).sum().backward()
    print(watch.summary())
    print("\nWhat the first entry runs:\n")
    print(watch["modified_sigmoid"].entries[0].pseudo_source)
    print("\nA call with 10 elements", torchloom.explain_call(compiled, arguments(10)))
    doubles = {name: value.double() for name, value in arguments(10).items()}
    print("A call with float64", torchloom.explain_call(compiled, doubles))
    print(f"\nThe page: torchloom report {options.out}")


if __name__ == "__main__":
    main()
