"""Evaluates what a trace assumed of sizes for each size of a contract, and words what fails.

Every guard on sizes is evaluated for every size: for every combination where several sizes vary and there are not too
many, else for some, and then each call asks again. A guard that fails somewhere is reported at build time, with the
line that asked, the sizes for which it fails, where the range would have to be cut, and what else can be done.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchloom.pieces.symbols import SizeGuard
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.dims import Derived, Dim, Float, code_of
from torchloom.serve.model.target import Target

_MOST_POINTS = 200_000
"""Combinations that are all tried; of more, the corners and random ones."""
_NUM_RANDOM = 20_000
_MOST_SIZES_WITH_FLOATS = 500

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class ProofVerdict:
    """What became of one guard."""

    guard: str
    where: str
    """File and line of the user's code, where known."""
    failing: tuple[Sizes, ...]
    """Sizes for which it does not hold; all of them, or those found."""
    is_exhaustive: bool
    """Whether every combination of sizes was tried."""
    code: str = ""
    """The condition as Python, in which `n_batch` stands for the dim `batch`."""

    @property
    def holds(self) -> bool:
        """Whether no size was found that breaks it."""
        return not self.failing

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        if self.holds:
            how = (
                "for every size"
                if self.is_exhaustive
                else "wherever it was tried, and is asked at each call"
            )
            return f"holds {how}: {self.guard}{at}"
        return f"fails for {show_sizes(self.failing)}: {self.guard}{at}"


def prove(
    guards: Iterable[SizeGuard],
    dims: Sequence[Dim],
    traced: Sizes,
    derived: Iterable[Derived] = (),
    floats: Mapping[float, Float] | None = None,
    seed: int = 0,
) -> list[ProofVerdict]:
    """Evaluate guards for all sizes.

    Args:
        guards: what a trace relied on.
        dims: the sizes that vary.
        traced: what they were during the trace: different numbers for different ones.
        derived: sizes that follow from them.
        floats: arguments that vary, by what they were during the trace.
        seed: of random combinations, where there are too many to try all.
    """
    # Sizes that do not vary are numbers in a trace, even where one is equal to a varying one.
    varying = {dim.name for dim in dims if dim.min < dim.max}
    size_of: dict[float, Dim | Derived] = {
        size.of(traced[size.dim.name]): size
        for size in [*dims, *derived]
        if size.dim.name in varying
    }
    return [_judge(guard, dims, size_of, floats or {}, seed) for guard in guards]


def cuts(verdicts: Iterable[ProofVerdict], dim: Dim) -> list[int]:
    """Return sizes at which a range would have to begin anew so that each part is of one kind.

    Example:
        >>> failing = tuple({"batch": n} for n in (1, 2, 3))
        >>> cuts([Verdict("n >= 4", "", failing, True)], Dim("batch", 1, 64))
        [4]
    """
    found: set[int] = set()
    for verdict in verdicts:
        bad = {sizes[dim.name] for sizes in verdict.failing if dim.name in sizes}
        found |= {
            size
            for before, size in itertools.pairwise(dim.sizes)
            if (size in bad) != (before in bad)
        }
    return sorted(found)


def show_sizes(failing: Sequence[Sizes]) -> str:
    """Return sizes as ranges, for people.

    Example:
        >>> show_sizes([{"batch": n} for n in (1, 2, 3, 7)])
        'batch 1 to 3, 7'
    """
    names = list(failing[0]) if failing else []
    if len(names) == 1:
        numbers = sorted({sizes[names[0]] for sizes in failing})
        runs = [
            list(run) for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])
        ]
        shown = [
            str(run[0][1]) if len(run) == 1 else f"{run[0][1]} to {run[-1][1]}" for run in runs
        ]
        more = f" and {len(shown) - 8} more ranges" if len(shown) > 8 else ""
        return f"{names[0]} {', '.join(shown[:8])}{more}"
    shown = [", ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in failing[:4]]
    more = f" and {len(failing) - 4} more" if len(failing) > 4 else ""
    return "; ".join(shown) + more


def _judge(
    guard: SizeGuard,
    dims: Sequence[Dim],
    size_of: Mapping[float, Dim | Derived],
    floats: Mapping[float, Float],
    seed: int,
) -> ProofVerdict:
    sizes = {hint: size for hint, size in size_of.items() if hint in guard.hints}
    names = {size.dim.name for size in sizes.values()}
    numbers = {hint: floats[hint] for hint in guard.hints if hint in floats}
    points, is_exhaustive = _points([dim for dim in dims if dim.name in names], seed)
    if numbers:
        points, is_exhaustive = _with_floats(points, list(numbers.values()), seed), False
    fixed = {hint: hint for hint in guard.hints}
    failing = []
    for point in points:
        there = {hint: size.of(int(point[size.dim.name])) for hint, size in sizes.items()}
        chosen = {hint: point[number.path] for hint, number in numbers.items()}
        if not guard.holds({**fixed, **there, **chosen}):
            failing.append(point)
    text = guard.text
    for hint in sorted({**sizes, **numbers}, reverse=True):
        words = sizes[hint].text if hint in sizes else numbers[hint].path
        text = text.replace(f"<size {hint}>", words)
    code = _for_calls(guard.code, sizes, numbers)
    return ProofVerdict(text, guard.where, tuple(failing), is_exhaustive, code)


def _for_calls(
    code: str, sizes: Mapping[float, Dim | Derived], floats: Mapping[float, Float]
) -> str:
    """Return a guard's condition with sizes of calls in the place of hints."""

    def said(found: re.Match[str]) -> str:
        hint = ast.literal_eval(found[1])
        if hint in floats:
            return floats[hint].variable
        return code_of(sizes[hint]) if hint in sizes else repr(hint)

    return _HINT.sub(said, code)


_HINT = re.compile(r"\{([^{}]+)\}")


def _with_floats(
    points: Iterable[dict[str, Any]], floats: Sequence[Float], seed: int
) -> Iterator[dict[str, Any]]:
    """Return combinations of sizes and floats: all ends and special values, at some of the sizes."""
    draw = random.Random(seed)
    rows = list(itertools.islice(points, _NUM_RANDOM))
    chosen = rows[:: max(1, len(rows) // _MOST_SIZES_WITH_FLOATS)]
    for row in chosen:
        for values in itertools.product(*(each.trials(draw) for each in floats)):
            yield {**row, **{each.path: v for each, v in zip(floats, values, strict=True)}}


def _points(dims: Sequence[Dim], seed: int) -> tuple[Iterator[dict[str, int]], bool]:
    """Return combinations of sizes, and whether they are all there are."""
    ranges = [dim.sizes for dim in dims]
    if len(dims) == 1 or math.prod(map(len, ranges)) <= _MOST_POINTS:
        return (_named(dims, row) for row in itertools.product(*ranges)), True
    draw = random.Random(seed)
    corners = itertools.product(*({*each[:2], each[-1]} for each in ranges))
    others = (tuple(draw.choice(each) for each in ranges) for _ in range(_NUM_RANDOM))
    # Each size alone, with the others at an end: what depends on one size is then judged in full.
    alone = (
        (*(d.max if i != at else size for i, d in enumerate(dims)),)
        for at, each in enumerate(ranges)
        for size in each
    )
    return (_named(dims, row) for row in itertools.chain(corners, alone, others)), False


def _named(dims: Sequence[Dim], row: Sequence[int]) -> dict[str, int]:
    return {dim.name: size for dim, size in zip(dims, row, strict=True)}


def why_not_proven(target: Target, box: Box, failed: Collection[ProofVerdict]) -> str:
    """Say what fails, for which sizes, where, and what can be done.

    Args:
        target: the model.
        box: the sizes that it was to be one program for.
        failed: the conditions that do not hold for all of them.
    """
    lines = [f"{target.name} is not the same program for all of {box}:"]
    for verdict in list(failed)[:5]:
        where = f"\n    at {verdict.where}" if verdict.where else ""
        lines.append(f"  not true for {show_sizes(verdict.failing)}: {verdict.guard}{where}")
    if len(failed) > 5:
        lines.append(f"  and {len(failed) - 5} more")
    lines.append(
        "Move the decision out of the model, hide it in an operator (torchloom.custom_op), leave these "
        "sizes out of the contract, or let shapes='split' compile the parts apart."
    )
    lines += multiples_to_promise("\n".join(lines))
    return "\n".join(lines)


def why_not_compiled(target: Target, box: Box, shapes: str, error: BaseException) -> str:
    """Say in one sentence what a compiler's error is about: its reason, operator, line, and what else may work."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), "")
    operator = re.search(r"^\s*target: (\S+)", text, re.MULTILINE)
    at = f" of {operator[1]}" if operator else ""
    at += _last_place(text)
    others = {
        "split": "cuts ranges where sizes differ",
        "unbacked": "assumes nothing of sizes",
        "bucket": "compiles exact sizes, and pads smaller calls",
    }
    ways = ", ".join(f"shapes={name!r} ({what})" for name, what in others.items() if name != shapes)
    return (
        f"{target.name} cannot be compiled for {box} with shapes={shapes!r} because{at} the compiler says "
        f"{type(error).__name__}: {reason[:300]}; {ways} may work, as may the operator in one of your own "
        "(torchloom.custom_op)"
    )


def decision_by_value(target: Target, error: BaseException) -> str:
    """Say in one sentence that a model decides by a number that a tensor holds; nothing where an error is about more."""
    text = str(error)
    decision = re.search(r"Could not guard on data-dependent expression (.+?) \(unhinted", text)
    if decision is None:
        return ""
    return (
        f"{target.name} decides by a number that a tensor holds{_last_place(text)} ({decision[1]}), and one program cannot "
        "go both ways: compute both and choose with torch.where, or give the number as an argument, which the contract "
        "describes by a Dim or number(low, high)"
    )


def _last_place(text: str) -> str:
    """Return the innermost line outside of torch that an error names."""
    places = [
        f"{path}:{line} in {function}"
        for path, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
        if not path.startswith(_TORCH)
    ]
    return f" at {places[-1]}" if places else ""


_TORCH = str(Path(torch.__file__).parent)


def multiples_to_promise(text: str) -> list[str]:
    """Return the advice for conditions of torch's that ask whether a size is a multiple of a number."""
    numbers = dict.fromkeys(re.findall(r"Eq\(Mod\(\w+, (\d+)\), 0\)", text))
    return [
        f"If sizes are multiples of {number}, promise it: Dim(..., multiple_of={number})"
        for number in numbers
    ]
