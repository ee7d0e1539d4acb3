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
    """By the names of the activations that wait on the host; what was learned last stands last."""
    _tried: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def key(self) -> str:
        """Text of all that is known, equal on all ranks."""
        forms = [(sorted(names), size) for names, size in self._by_form.items()]
        return f"{forms} {len(self._tried)}"

    def learn(self, plan: GraphPlan) -> None:
        """Take the difference between a plan's graphs and their code into account."""
        self._by_form.pop(plan.offload, None)
        self._by_form[plan.offload] = plan.peak_bytes - plan.graph_peak_bytes
        self._tried.add(plan.choices)

    def has(self, plan: GraphPlan) -> bool:
        """Say whether code for a plan that decides the same is known."""
        return plan.choices in self._tried

    def bytes_of(self, moved: frozenset[str]) -> int:
        """Return what code is expected to need beyond graphs in which these activations move."""
        for form in (moved, frozenset[str]()):
            if form in self._by_form:
                return self._by_form[form]
        return next(reversed(self._by_form.values()), 0)
