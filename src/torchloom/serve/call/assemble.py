"""The pieces of a graph put together as one function, recorded as CUDA graphs where that is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from torchloom.serve.call.cuda_graphs import Call, CudaGraphs, Recorded
from torchloom.serve.call.stitching import Stitching


def assembled(
    stitching: Stitching,
    calls: Sequence[Call],
    how: CudaGraphs,
    fixed: Sequence[Collection[int] | None],
    written: Sequence[Collection[int]],
) -> tuple[Call, list[Recorded]]:
    """Return the function of a graph in pieces, recorded as asked, and what of it is recorded.

    Args:
        stitching: the order of calls.
        calls: the pieces' functions.
        how: what is recorded.
        fixed: for each piece, places of inputs that are the model's own tensors; None for operators that
            stay as they are, which are not recorded by themselves.
        written: for each piece, places of inputs that it writes to.
    """
    if how == "pieces":
        passing = _passing(stitching)
        calls = [
            call if fixed[n] is None else Recorded(call, fixed[n] or (), written[n], passing[n])
            for n, call in enumerate(calls)
        ]
    whole = stitching.function(calls)
    if how != "full":
        return whole, [each for each in calls if isinstance(each, Recorded)]
    recorded = Recorded(
        whole,
        _of_the_whole(stitching, [places or () for places in fixed]),
        _of_the_whole(stitching, written),
    )
    return recorded, [recorded]


def _passing(stitching: Stitching) -> dict[int, set[int]]:
    """Return for each piece the places of inputs that other pieces make, in one call of it at least."""
    found: dict[int, set[int]] = defaultdict(set)
    for step in stitching.steps:
        found[step.piece] |= {
            place
            for place, ref in enumerate(step.args)
            if ref.slot is not None and ref.slot >= stitching.num_inputs
        }
    return found


def _of_the_whole(stitching: Stitching, places: Sequence[Collection[int]]) -> set[int]:
    """Return the inputs of a graph that are inputs of its pieces at some places."""
    return {
        ref.slot
        for step in stitching.steps
        for place, ref in enumerate(step.args)
        if place in places[step.piece] and ref.slot is not None and ref.slot < stitching.num_inputs
    }
