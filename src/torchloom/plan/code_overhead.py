"""The difference between the memory that graphs need and the memory that their compiled code needs.

Fusion makes code need less, buffers laid out anew make it need more, and activations that wait on the
host change both: what is learned with one set of offloaded values is taken for another set only until
that one was compiled as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.plan.model import GraphPlan


@dataclass
class CodeOverhead:
    """What the compiled code of one graph's plans needed beyond the graphs.

    Example:
        >>> CodeOverhead().bytes_of(frozenset())
        0
    """

    _bytes_by_offload: dict[frozenset[str], int] = field(default_factory=dict)
    """By the names of the offloaded activations; what was learned last stands last."""
    _compiled: set[tuple[object, ...]] = field(default_factory=set)
    """The choices of plans that were compiled."""

    @property
    def key(self) -> str:
        """Text of all that is known, equal on all ranks."""
        known = [(sorted(names), size) for names, size in self._bytes_by_offload.items()]
        return f"{known} {len(self._compiled)}"

    def learn(self, plan: GraphPlan) -> None:
        """Note the difference between a plan's graphs and the code that was compiled for them."""
        self._bytes_by_offload.pop(plan.offload, None)
        self._bytes_by_offload[plan.offload] = plan.peak_bytes - plan.graph_peak_bytes
        self._compiled.add(plan.choices)

    def knows(self, plan: GraphPlan) -> bool:
        """Say whether a plan that decides the same was compiled."""
        return plan.choices in self._compiled

    def bytes_of(self, offloaded: frozenset[str]) -> int:
        """Return what code is expected to need beyond graphs that offload these activations."""
        for names in (offloaded, frozenset[str]()):
            if names in self._bytes_by_offload:
                return self._bytes_by_offload[names]
        return next(reversed(self._bytes_by_offload.values()), 0)
