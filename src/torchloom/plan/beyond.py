"""What a compiler's code was found to need beyond its graphs.

Fusion makes code need less, buffers laid out anew make it need more, and activations that move to the
host change both: what is learned of one form of a graph is taken for another only until that was
compiled as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.plan.model import GraphPlan


@dataclass
class Beyond:
    """What was learned of one graph's plans.

    Example:
        >>> Beyond().bytes_of(frozenset())
        0
    """

    _by_form: dict[frozenset[str], int] = field(default_factory=dict)
    """By the names of the activations that wait on the host."""
    _tried: set[tuple[object, ...]] = field(default_factory=set)
    _last: int = 0

    @property
    def key(self) -> str:
        """Text of all that is known, equal on all ranks."""
        forms = sorted((sorted(names), size) for names, size in self._by_form.items())
        return f"{forms} {self._last} {len(self._tried)}"

    def learn(self, plan: GraphPlan) -> None:
        """Take the difference between a plan's graphs and their code into account."""
        self._last = self._by_form[plan.offload] = plan.peak_bytes - plan.graph_peak_bytes
        self._tried.add(plan.choices)

    def has(self, plan: GraphPlan) -> bool:
        """Say whether code for a plan that decides the same is known."""
        return plan.choices in self._tried

    def bytes_of(self, moved: frozenset[str]) -> int:
        """Return what code is expected to need beyond graphs in which these activations move."""
        known = self._by_form.get(moved, self._by_form.get(frozenset()))
        return self._last if known is None else known
