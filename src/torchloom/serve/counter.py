"""Counts of traces, compilations, loads and refused calls in this process, and a check for tests.

with counter.expect(num_compiles=1):
    engine.start()
with counter.expect(num_compiles=0, num_eager_calls=0):
    serve(requests)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from torchloom.errors import ExpectationError


@dataclass
class Counter:
    """Counts of this process since it began; they only grow."""

    num_traces: int = 0
    """Graphs that were captured."""
    num_compiles: int = 0
    """Programs made ready for a range or a size; what was compiled and then split does not count."""
    num_pieces: int = 0
    """Graphs that a compiler was given: equal layers count once."""
    num_pieces_found: int = 0
    """Graphs that a store held already, while a program was compiled."""
    num_loads: int = 0
    """Programs loaded from a store."""
    num_saves: int = 0
    """Programs saved to a store."""
    num_eager_calls: int = 0
    """Calls of programs that ran the model as it is: outside of a contract, or as `eager()` and the like ask."""
    num_refused_calls: int = 0
    """Calls outside of a contract that raised an error."""
    num_recorded: int = 0
    """CUDA graphs recorded."""

    def values(self) -> dict[str, int]:
        """Return all counts by name."""
        return asdict(self)

    @contextmanager
    def expect(self, **expected: int) -> Iterator[None]:
        """Check by how much counts grow within a block.

        Raises:
            TypeError: there is no count of that name.
            ExpectationError: one grew by something else; all counts are named.

        Example:
            >>> with counter.expect(num_compiles=0):
            ...     pass
        """
        known = {each.name for each in fields(self)}
        for name in expected:
            if name not in known:
                raise TypeError(f"there is no count {name!r}: use {', '.join(sorted(known))}")
        before = self.values()
        yield
        grown = {name: value - before[name] for name, value in self.values().items()}
        wrong = [
            f"{name} grew by {grown[name]}, expected {wanted}"
            for name, wanted in expected.items()
            if grown[name] != wanted
        ]
        if wrong:
            others = ", ".join(f"{name} {value}" for name, value in grown.items() if value)
            raise ExpectationError(f"{'; '.join(wrong)} (in this block: {others or 'nothing'})")


counter = Counter()
"""The process's counter."""
