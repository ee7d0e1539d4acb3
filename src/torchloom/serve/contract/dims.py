"""Sizes that vary: from where to where, in which steps, and sizes that follow from one.

batch, length = Dim("batch", 1, 64), Dim("length", 8, 512, multiple_of=8)
Contract({"pairs": tensor(2 * batch, length), "weights": tensor(batch)})
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from torchloom.errors import ContractError


class _Linear:
    """What both kinds of sizes do: each is `factor * dim + offset`."""

    @property
    def text(self: Dim | Derived) -> str:
        """The size in words."""
        times = f"{self.factor}*" if self.factor > 1 else ""
        return f"{times}{self.dim.name}{self.offset:+d}" if self.offset else times + self.dim.name

    def of(self: Dim | Derived, value: int) -> int:
        """Return the size where the dim has a value."""
        return self.factor * value + self.offset

    def value_at(self: Dim | Derived, size: int) -> int | None:
        """Return the dim's value where this size is given; None if there is none."""
        value, rest = divmod(size - self.offset, self.factor)
        return value if rest == 0 and value in self.dim else None

    def __mul__(self: Dim | Derived, factor: int) -> Derived:
        """Return a size so many times as large."""
        return Derived(self.dim, self.factor * factor, self.offset * factor)

    __rmul__ = __mul__

    def __add__(self: Dim | Derived, offset: int) -> Derived:
        """Return a size larger by so many."""
        return Derived(self.dim, self.factor, self.offset + offset)

    __radd__ = __add__

    def __sub__(self: Dim | Derived, offset: int) -> Derived:
        """Return a size smaller by so many."""
        return Derived(self.dim, self.factor, self.offset - offset)


@dataclass(frozen=True)
class Dim(_Linear):
    """A size, or a whole number, that varies; both ends included.

    Args:
        name: of the size.
        min: the least; rounded up to a multiple.
        max: the greatest; rounded down to a multiple.
        multiple_of: all sizes are multiples of it.

    `2 * dim`, `dim + 1` and the like are sizes that follow from it (`Derived`).

    Raises:
        ContractError: the name is no identifier, or no number lies within.

    Example:
        >>> Dim("batch", 1, 64)
        Dim('batch', 1, 64)
        >>> list(Dim("length", 1, 30, multiple_of=8).sizes)
        [8, 16, 24]
    """

    name: str
    min: int
    max: int
    multiple_of: int = 1
    factor: ClassVar[int] = 1
    offset: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Check the range."""
        if not self.name.isidentifier():
            raise ContractError(f"{self.name!r} is no name of a size: use letters, digits and _")
        ends = (self.min, self.max, self.multiple_of)
        if any(type(each) is not int for each in ends) or self.multiple_of < 1:
            raise ContractError(
                f"the size {self.name!r} goes from {self.min!r} to {self.max!r} in multiples of "
                f"{self.multiple_of!r}: give whole numbers, the last one at least 1"
            )
        low = -(-self.min // self.multiple_of) * self.multiple_of
        high = self.max // self.multiple_of * self.multiple_of
        if low > high:
            of = f" in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
            raise ContractError(
                f"the size {self.name!r} goes from {self.min} to {self.max}{of}: there is none"
            )
        object.__setattr__(self, "min", low)
        object.__setattr__(self, "max", high)

    def __repr__(self) -> str:
        of = f", multiple_of={self.multiple_of}" if self.multiple_of > 1 else ""
        return f"Dim({self.name!r}, {self.min}, {self.max}{of})"

    def __str__(self) -> str:
        return f"{self.name} {self.range_text}"

    def __contains__(self, size: int) -> bool:
        """Say whether a size is allowed."""
        return size in self.sizes

    @property
    def sizes(self) -> range:
        """All sizes."""
        return range(self.min, self.max + 1, self.multiple_of)

    @property
    def range_text(self) -> str:
        """The range in words."""
        if self.min == self.max:
            return str(self.min)
        of = f" in multiples of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.min} to {self.max}{of}"

    @property
    def dim(self) -> Dim:
        """Itself, as of every size that follows from it."""
        return self


@dataclass(frozen=True)
class Derived(_Linear):
    """A size that follows from another: `factor * dim + offset`.

    Example:
        >>> size = 2 * Dim("batch", 1, 64) + 1
        >>> size.text, size.of(3), size.value_at(7), size.value_at(8)
        ('2*batch+1', 7, 3, None)
    """

    dim: Dim
    factor: int
    offset: int

    def __post_init__(self) -> None:
        """Check that it is a size."""
        if type(self.factor) is not int or type(self.offset) is not int or self.factor < 1:
            raise ContractError(
                f"a size made of {self.dim.name!r} is a whole number times it, plus or minus a whole number: "
                f"{self.factor!r} * {self.dim.name} + {self.offset!r} is none"
            )

    def __repr__(self) -> str:
        return self.text


def name_in_code(path: str) -> str:
    """Return what a path is called where it has to be a name; keys of dicts may be any text.

    Example:
        >>> name_in_code("x.mask"), name_in_code("x.a-b")
        ('x__mask', 'x__a_2d_b')
    """
    return re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", path.replace(".", "__"))


@dataclass(frozen=True)
class Float:
    """A float argument that varies."""

    path: str
    low: float
    high: float

    @property
    def hint(self) -> float:
        """What it is where nobody chose: no whole number, and at a place that nothing else is at."""
        value = self.low + (self.high - self.low) * _WITHIN
        return value if value % 1 else value + (self.high - self.low) * _WITHIN / 8

    @property
    def variable(self) -> str:
        """What it is called in code."""
        return f"n_{name_in_code(self.path)}"

    def trials(self, draw: random.Random) -> list[float]:
        """Return values that are worth trying: the ends, special ones between them, and random ones."""
        inside = [value for value in (0.0, 1.0, -1.0) if self.low < value < self.high]
        return [
            self.low,
            self.high,
            *inside,
            *(draw.uniform(self.low, self.high) for _ in range(5)),
        ]


_WITHIN = 0.3819660113

Size = Dim | Derived | int
"""A size of a tensor: it varies, follows from one that does, or is a number."""


def code_of(size: Dim | Derived) -> str:
    """Return the size as Python, in which `n_batch` stands for the dim `batch`."""
    name = f"n_{size.dim.name}"
    return name if isinstance(size, Dim) else f"({size.factor} * {name} + {size.offset})"
