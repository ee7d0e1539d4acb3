"""Puts the pieces of a graph together: the order of their calls, and one function made of it.

step 0   piece 0 (inputs 0, 4)      -> 7
step 1   piece 1 (inputs 1, 2, 7)   -> 8, 9
result   9
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchloom.serve.call.cuda_graphs import Call, CudaGraphs, Recorded


class Ref(NamedTuple):
    """A value: that of a slot, or a constant."""

    slot: int | None
    constant: Any = None


class Step(NamedTuple):
    """One call of a piece."""

    piece: int
    args: tuple[Ref, ...]
    results: tuple[int, ...]
    """The slots that its results fill."""


@dataclass(frozen=True)
class Stitching:
    """The order of calls; inputs fill the first slots."""

    num_inputs: int
    steps: tuple[Step, ...]
    results: tuple[Ref, ...]

    def function(self, pieces: Sequence[Call]) -> Call:
        """Return a function of the inputs; values are dropped after their last use."""
        if self._is_direct():
            return pieces[0]
        last = {}
        for number, step in enumerate(self.steps):
            for slot in (*(ref.slot for ref in step.args), *step.results):
                last[slot] = number
        for ref in self.results:
            last.pop(ref.slot, None)
        lines = [f"def stitched({', '.join(f'v{slot}' for slot in range(self.num_inputs))}):"]
        for number, step in enumerate(self.steps):
            targets = "".join(f"v{slot}, " for slot in step.results)
            args = ", ".join(map(_spell, step.args))
            done = {slot for slot, at in last.items() if at == number and slot is not None}
            taken = done & {ref.slot for ref in step.args}
            call = f"p{step.piece}({args})"
            if hasattr(pieces[step.piece], "boxed"):
                # A list that the piece empties: what it takes last is freed while it runs.
                lines += [f"    a = [{args}]", *_deleted(taken)]
                call, done = f"p{step.piece}(a)", done - taken
            lines += [f"    {targets}= {call}" if targets else f"    {call}", *_deleted(done)]
        lines.append(f"    return ({''.join(f'{_spell(ref)}, ' for ref in self.results)})")
        scope: dict[str, Any] = {
            f"p{number}": getattr(piece, "boxed", piece) for number, piece in enumerate(pieces)
        }
        exec(compile("\n".join(lines), "<torchloom stitching>", "exec"), scope)
        return scope["stitched"]

    def only_from(self, slots: Collection[int], num_pieces: int) -> list[frozenset[int]]:
        """Return for each piece the places of inputs that are some slots in all calls of it."""
        found: dict[int, frozenset[int]] = {}
        for step in self.steps:
            places = frozenset(place for place, ref in enumerate(step.args) if ref.slot in slots)
            found[step.piece] = found.get(step.piece, places) & places
        return [found.get(piece, frozenset()) for piece in range(num_pieces)]

    def _is_direct(self) -> bool:
        """Say whether there is one piece that takes the inputs and returns the results as they are."""
        if len(self.steps) != 1:
            return False
        (step,) = self.steps
        inputs = tuple(Ref(slot) for slot in range(self.num_inputs))
        return step.args == inputs and self.results == tuple(Ref(slot) for slot in step.results)


def _deleted(slots: Iterable[int | None]) -> list[str]:
    names = ", ".join(f"v{slot}" for slot in sorted(slots, key=str))
    return [f"    del {names}"] if names else []


def _spell(ref: Ref) -> str:
    return repr(ref.constant) if ref.slot is None else f"v{ref.slot}"


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
