"""A box: a range for each varying size. The contract as a whole is one; ranges, exact sizes and cuts are parts of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchloom.errors import ContractError
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Dim

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Box:
    """All combinations of sizes between two ends, both included.

    Example:
        >>> box = Box.of([Dim("batch", 1, 64)])
        >>> [str(part) for part in box.cut("batch", [2, 8])]
        ['batch 1', 'batch 2 to 7', 'batch 8 to 64']
    """

    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, dims: Iterable[Dim]) -> Box:
        """Return the box of some dims, sorted by name."""
        return cls(tuple(sorted(dims, key=lambda dim: dim.name)))

    def to_json(self) -> list[list[Any]]:
        """Return it as plain data."""
        return [[dim.name, dim.min, dim.max, dim.multiple_of] for dim in self.dims]

    @classmethod
    def from_json(cls, stored: Iterable[Sequence[Any]]) -> Box:
        """Return what `to_json` wrote."""
        return cls(tuple(Dim(name, *ends) for name, *ends in stored))

    def __contains__(self, sizes: Sizes) -> bool:
        """Say whether it covers a call."""
        return all(sizes[dim.name] in dim for dim in self.dims)

    def __str__(self) -> str:
        return ", ".join(map(str, self.dims)) or "all calls"

    @property
    def varying(self) -> tuple[Dim, ...]:
        """The dims that hold more than one size."""
        return tuple(dim for dim in self.dims if dim.min < dim.max)

    @property
    def largest(self) -> dict[str, int]:
        """The largest sizes."""
        return {dim.name: dim.max for dim in self.dims}

    def cut(self, name: str, starts: Iterable[int]) -> list[Box]:
        """Return the parts that begin at the given sizes of one dim."""
        (dim,) = (dim for dim in self.dims if dim.name == name)
        step = dim.multiple_of
        inside = (-(-at // step) * step for at in starts)
        edges = sorted({dim.min, *(at for at in inside if dim.min < at <= dim.max)})
        ends = [at - step for at in edges[1:]] + [dim.max]
        return [
            Box(tuple(replace(d, min=low, max=high) if d.name == name else d for d in self.dims))
            for low, high in zip(edges, ends, strict=True)
        ]

    def hints(self, derived: Iterable[Derived] = ()) -> dict[str, int]:
        """Return sizes to trace with: large ones, and no two alike where they vary.

        Args:
            derived: sizes that follow from these, which are to be unlike all others too.

        Raises:
            ContractError: there are more varying dims than sizes to tell them apart.
        """
        found = {dim.name: dim.min for dim in self.dims if dim.min == dim.max}
        used: set[int] = set()
        # The narrowest choose first, so that the others can give way.
        for dim in sorted(self.varying, key=lambda dim: dim.max - dim.min):
            its = [dim, *(size for size in derived if size.dim.name == dim.name)]
            free = next((n for n in reversed(dim.sizes) if _are_new(n, its, used)), None)
            if free is None:
                raise ContractError(
                    f"{dim.name!r} ({dim.range_text}) has no size of its own beside the other "
                    "varying sizes: widen it, or fix one of them"
                )
            found[dim.name] = free
            used.update(size.of(free) for size in its)
        return found

    def ranges(self, derived: Iterable[Derived] = ()) -> dict[int, tuple[int, int]]:
        """Return the ends of each size that varies, by what `hints` says that it is traced with."""
        hints, dims = self.hints(derived), {dim.name: dim for dim in self.varying}
        return {
            size.of(hints[dim.name]): (size.of(dim.min), size.of(dim.max))
            for size in (*self.varying, *derived)
            if (dim := dims.get(size.dim.name))
        }

    def edges(self) -> Iterator[dict[str, int]]:
        """Yield sizes at which operators may behave in ways of their own.

        All at their least, all at their greatest, and each dim at 0, 1, 2, next to its ends, with the
        others small and no two alike.
        """
        seen: list[dict[str, int]] = []
        least = {dim.name: dim.min for dim in self.dims}
        small = {dim.name: _small(dim, place) for place, dim in enumerate(self.dims)}
        candidates = [least, small, self.largest]
        for dim in self.varying:
            special = (0, 1, 2, *dim.sizes[:2], dim.max)
            candidates += [{**small, dim.name: size} for size in special if size in dim]
        for sizes in candidates:
            if sizes not in seen:
                seen.append(sizes)
                yield sizes


def _are_new(number: int, sizes: Iterable[Dim | Derived], used: Iterable[int]) -> bool:
    """Say whether sizes are unlike one another, and all others, where their dim is a number."""
    found = [size.of(number) for size in sizes]
    return len(set(found)) == len(found) and not set(found) & set(used)


def _small(dim: Dim, place: int) -> int:
    """Return a small size that is another one at each place."""
    sizes = dim.sizes
    first = next((at for at, size in enumerate(sizes) if size >= 3), len(sizes) - 1)
    return sizes[min(first + place, len(sizes) - 1)]


def first_boxes(
    contract: Contract,
    ranges: Sequence[tuple[int, int]] | Mapping[str, Sequence[tuple[int, int]]] | None,
) -> list[Box]:
    """Return the boxes that a user asked for: the whole contract, or its ranges.

    Args:
        contract: what varies.
        ranges: for the only varying dim, or for dims by name.

    Raises:
        ContractError: ranges overlap, leave a gap, or name no varying dim.
    """
    whole = Box.of(contract.dims.values())
    if not ranges:
        return [whole]
    boxes = [whole]
    for name, given in _by_name(contract, ranges, "ranges").items():
        dim = contract.dims[name]
        ordered = sorted(tuple(pair) for pair in given)
        expected, step = dim.min, dim.multiple_of
        for low, high in ordered:
            if -(-low // step) * step != expected or high < low:
                raise ContractError(
                    f"ranges of {name!r} go from {low} to {high} where {expected} has to begin: together "
                    f"they have to cover {dim.min} to {dim.max}, each size once"
                )
            expected = high // step * step + step
        if expected != dim.max + step:
            raise ContractError(
                f"ranges of {name!r} end at {expected - step}, the contract at {dim.max}: cover all of it"
            )
        boxes = [part for box in boxes for part in box.cut(name, [low for low, _ in ordered])]
    return boxes


def exact_boxes(
    contract: Contract, sizes: Sequence[int] | Mapping[str, Sequence[int]]
) -> list[Box]:
    """Return a box for each size that gets a program of its own; other dims keep their ranges.

    Raises:
        ContractError: a size lies outside of the contract.
    """
    boxes = []
    for name, given in _by_name(contract, sizes, "sizes").items():
        dim = contract.dims[name]
        for size in sorted(set(given)):
            if size not in dim:
                raise ContractError(
                    f"sizes names {size} for {name!r}, the contract allows {dim.range_text}"
                )
            exact = {**contract.dims, name: replace(dim, min=size, max=size)}
            boxes.append(Box.of(exact.values()))
    return boxes


def _by_name(contract: Contract, given: object, what: str) -> dict[str, Sequence]:
    varying = [dim.name for dim in contract.dims.values() if dim.min < dim.max]
    if isinstance(given, Mapping):
        for name in given:
            if name not in contract.dims:
                raise ContractError(
                    f"{what} names {name!r}, the contract has {', '.join(contract.dims) or 'none'}"
                )
        return dict(given)
    if not given:
        return {}
    if len(varying) != 1:
        raise ContractError(
            f"{what} needs names because {len(varying)} sizes vary: "
            f"{what}={{{', '.join(f'{name!r}: [...]' for name in varying[:2])}}}"
        )
    return {varying[0]: given}  # type: ignore[dict-item]
