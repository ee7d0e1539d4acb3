"""Fit the fake of an operator to watched calls: formulas of its arguments' sizes that are right for all of them.

    python examples/fit_a_fake.py

What fits some calls is no proof: read the text, put it into your code, and let `check_op` try it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import torchloom


@torchloom.custom_op("examples::window_sums")
def window_sums(x: Tensor, width: int) -> Tensor:
    """Sum neighbours: stands for a kernel of yours."""
    return x.unfold(1, width, 1).sum(2)


def formulas(names: list[str]) -> Iterator[str]:
    """Yield expressions over sizes, the simplest first."""
    yield from names
    yield from (f"{a} {sign} {k}" for a in names for sign in ("*", "//") for k in (2, 3, 4))
    for a, b in itertools.permutations(names, 2):
        yield from (f"{a} + {b}", f"{a} * {b}", f"{a} - {b}", f"{a} // {b}", f"{a} - {b} + 1")


def fit(op: Any, names: list[str], calls: list[tuple[Any, ...]]) -> str:
    """Return the text of a fake for an operator with one result, which has one dtype or that of its first argument.

    Args:
        op: the operator.
        names: of its arguments; the first is a tensor.
        calls: arguments of calls of different sizes.
    """
    given = [dict(zip(names, args, strict=True)) for args in calls]
    results = [op(*args) for args in calls]
    known = [name for name, value in given[0].items() if isinstance(value, int)]
    for name, value in given[0].items():
        if isinstance(value, Tensor):
            known += [f"{name}.shape[{dim}]" for dim in range(value.dim())]
    shape = []
    for dim in range(results[0].dim()):
        sizes = [result.shape[dim] for result in results]
        candidates = (*formulas(known), str(sizes[0]))
        fits = (text for text in candidates if [eval(text, {}, each) for each in given] == sizes)
        shape.append(next(fits, None) or f"...  # no formula gives {sizes}")
    dtype = f"{names[0]}.dtype" if results[0].dtype == calls[0][0].dtype else str(results[0].dtype)
    made = f"{names[0]}.new_empty(({', '.join(shape)},), dtype={dtype})"
    return f"lambda {', '.join(names)}: {made}"


def main() -> None:
    """Fit, register and check."""
    sizes = [(4, 9, 3), (5, 8, 2), (7, 11, 4)]  # three, as two fit a wrong formula: rows + width
    calls = [(torch.randn(rows, columns), width) for rows, columns, width in sizes]
    text = fit(window_sums, ["x", "width"], calls)
    print(f"fake={text}")
    window_sums.register_fake(eval(text, {"torch": torch}))
    print(torchloom.check_op(window_sums, calls))


if __name__ == "__main__":
    main()
