"""Sizes as symbols: where a fake decides by a size, or writes down one that only its example has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchloom.custom_ops.dims import refusal
from torchloom.custom_ops.samples import Dims, Sample
from torchloom.custom_ops.target import CheckedOperator, tensors_in
from torchloom.pieces.symbols import SizeGuard, size_guards

_HINTS = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Sizes of symbols while tracing: different ones, so that equal sizes are no accident."""
_TRIED = (2, 3, 4, 5, 6, 8, 13, 64, 257)


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition on sizes that a fake relies on, and that not all sizes meet."""

    condition: str
    where: str
    """File and line."""
    counterexample: str


def branches_of(target: CheckedOperator, example: Sample, dims: Sequence[Dims]) -> list[Branch]:
    """Run an operator's fake on symbolic sizes; return the conditions that it relies on.

    Args:
        target: the operator.
        example: a sample that it takes.
        dims: sizes that may change.
    """
    sample, sizes = example, {}
    for group, hint in zip(dims, _HINTS, strict=False):
        other = group.set(sample, hint)
        if refusal(target, other) is None:
            sample, sizes[hint] = other, group
    if not sizes:
        return []
    args, kwargs = sample.make()
    tensors = tensors_in([*args, *kwargs.values()])
    varying = [
        [any((number, dim) in group.places for group in sizes.values()) for dim in range(t.dim())]
        for number, t in enumerate(tensors)
    ]
    try:
        guards = size_guards(target.call, args, kwargs, varying)
    except Exception:  # noqa: BLE001 - a fake that raises is found by the runs on plain sizes
        return []
    found = []
    for guard in guards:
        bad = _counterexample(target, sample, sizes, guard)
        if bad is not None:
            found.append(Branch(guard.text, guard.where, bad))
    return found


def _counterexample(
    target: CheckedOperator, sample: Sample, sizes: dict[int, Dims], guard: SizeGuard
) -> str | None:
    """Return an input that the operator takes and that the guard rules out, None if there is none."""
    for hint in guard.hints & sizes.keys():
        for size in _TRIED:
            if guard.holds({**{each: each for each in guard.hints}, hint: size}):
                continue
            other = sizes[int(hint)].set(sample, size)
            if refusal(target, other) is None:
                return str(other)
    return None
