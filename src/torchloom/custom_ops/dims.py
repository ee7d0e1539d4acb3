"""Which sizes of an operator's arguments are free to change, and which only together."""

from __future__ import annotations

from torchloom.custom_ops.samples import Dims, Sample, groups_of
from torchloom.custom_ops.target import CheckedOperator


def refusal(target: CheckedOperator, sample: Sample) -> str | None:
    """Return what the operator itself says against an input, None if it takes it."""
    args, kwargs = sample.make()
    try:
        target.run(args, kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it raises, the input is none of its own
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def free_dims(target: CheckedOperator, example: Sample) -> list[Dims]:
    """Return the sizes that may change: alone where the operator takes that, else with equal ones."""
    free: list[Dims] = []
    for group in groups_of(example):
        alone = [Dims((place,)) for place in group.places]
        apart = [each for each in alone if len(alone) == 1 or _is_free(target, example, each)]
        places = {place for each in apart for place in each.places}
        tied = Dims(tuple(place for place in group.places if place not in places))
        candidates = [*apart, *([tied] if tied.places else [])]
        free += [each for each in candidates if _is_free(target, example, each)]
    return free


def _is_free(target: CheckedOperator, example: Sample, dims: Dims) -> bool:
    size = dims.size(example)
    others = {size + 1, 2 * size, 2 * size + 1, 3} - {size}
    return any(refusal(target, dims.set(example, other)) is None for other in sorted(others))
