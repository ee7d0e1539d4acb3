"""What is expected of combinations that were not tried, by the trials of others.

What a use of memory is worth is learned from trials of it alone. What several are worth together is
expected to be their sum, until a trial of them says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.costs import CostTable
from torchloom.plan.combinations import Combination
from torchloom.plan.form import GraphForm
from torchloom.plan.problem import CONFIGURED, TrialResult


@dataclass
class Estimates:
    """Expected times and peaks of combinations, learned from trials of others.

    Args:
        costs: times of copies.
    """

    costs: CostTable
    _start: Combination | None = None
    """The first that was tried: others are estimated by how they differ from it."""
    _overhead_us: dict[tuple[object, ...], float] = field(default_factory=dict)
    _error_us: dict[tuple[object, ...], float] = field(default_factory=dict)
    """How far estimates were off, by what was decided about gathers."""
    _behind_bytes: dict[tuple[object, ...], int] = field(default_factory=dict)
    """What passes behind the split last added to a peak, by the form and its gathers."""
    _least_behind_bytes: int | None = None
    """The least of all that they added."""

    def learn(self, combination: Combination, simulated_bytes: int, result: TrialResult) -> None:
        """Note a trial; the first is that of a graph with nothing kept.

        Args:
            combination: what was tried.
            simulated_bytes: the peak without the passes behind the split.
            result: what the trial found.
        """
        if self._start is None:
            self._start = combination
        elif combination.num_uses > 1:
            error_us = result.overhead_us - self._sum_us(self._start, combination)
            self._error_us[combination.gather_share, combination.transfers] = error_us
        self._overhead_us[combination.key] = result.overhead_us
        behind_bytes = result.peak_bytes - simulated_bytes
        self._behind_bytes[combination.gathers] = behind_bytes
        if self._least_behind_bytes is None or behind_bytes < self._least_behind_bytes:
            self._least_behind_bytes = behind_bytes

    @property
    def saved_bytes(self) -> int:
        """The most that passes behind the split took away from a peak."""
        return max(0, -min(self._behind_bytes.values(), default=0))

    @property
    def least_behind_bytes(self) -> int:
        """The least that passes behind the split added to a peak; less than 0: they took some away."""
        return self._least_behind_bytes or 0

    def behind_bytes(self, combination: Combination) -> int | None:
        """Return what passes behind the split are expected to add to peaks; None: no idea.

        Copies start and end where passes put them: what frees memory in one form does so there, but
        what is in flight is much the same in all.
        """
        known = self._behind_bytes.get(combination.gathers)
        alone = self._behind_bytes.get((id(combination.form), CONFIGURED, 0.0))
        if known is not None or alone is None or self._start is None:
            return known
        form, transfers = id(self._start.form), combination.transfers
        start = self._behind_bytes[form, CONFIGURED, 0.0]
        ahead = self._behind_bytes.get((form, transfers, 0.0), start)
        gathers = form, transfers, combination.gather_share
        return alone + self._behind_bytes.get(gathers, ahead) - start

    def overhead_us(self, combination: Combination) -> float:
        """Return what transfers are expected to add to compute, or what they are known to add."""
        known = self._overhead_us.get(combination.key)
        if known is not None or self._start is None:
            return known or 0.0
        error_us = self._error_us.get((combination.gather_share, combination.transfers), 0.0)
        return max(0.0, self._sum_us(self._start, combination) + error_us)

    def _sum_us(self, start: Combination, other: Combination) -> float:
        """Return what the uses of a combination are worth alone, added up."""
        form, gather_share, copy_share = id(start.form), other.gather_share, other.copy_share
        offloaded = self._effect_us(start, (id(other.form), CONFIGURED, 0.0, 0.0))
        if offloaded is None:
            offloaded = copied_us(other.form, self.costs)
        ahead = self._effect_us(start, (form, other.transfers, 0.0, 0.0)) or 0.0
        gathered = self._effect_us(start, (form, CONFIGURED, 1.0, 0.0)) or 0.0
        copied = self._effect_us(start, (form, CONFIGURED, 0.0, 1.0)) or 0.0
        kept = gather_share * gathered
        worth = offloaded + (1 - gather_share) * ahead + kept + copy_share * copied
        return self._overhead_us[start.key] + worth

    def _effect_us(self, start: Combination, key: tuple[object, ...]) -> float | None:
        known = self._overhead_us.get(key)
        return None if known is None else known - self._overhead_us[start.key]


def copied_us(form: GraphForm, costs: CostTable) -> float:
    """Return what copies of activations take from compute at least."""
    device = costs.device
    return device.link_load * device.round_trip_us() * form.offload.num_bytes
