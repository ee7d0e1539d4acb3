"""Ranks agree before they run: differing programs become an error, not a hang.

The ranks compare short texts through the process group's key-value store. Nothing is exchanged by a
collective, which would hang in just the case that this is for. Costs 0.3-2 ms for two ranks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch.distributed as dist

from torchloom import _torch
from torchloom.errors import AgreementError

TIMEOUT_S = 120.0
"""How long a rank may lag behind, e.g. because it compiles while others hit a cache."""


@dataclass
class Agreement:
    """Compares texts between all ranks of the default process group."""

    rank: int
    world_size: int
    timeout_s: float = TIMEOUT_S
    _ordinal: itertools.count[int] = field(default_factory=itertools.count)
    _serial: int = 0

    def check(self, what: str, text: str) -> None:
        """Raise on every rank unless all ranks hold the same text.

        All ranks must call in the same order.

        Args:
            what: what is compared, for the message.
            text: this rank's value; short, as it is shown when ranks differ.

        Raises:
            AgreementError: ranks differ, or some did not come within the timeout.
        """
        if self.world_size == 1:
            return
        held = self._exchange(what, f"{what}\0{text}")
        if len(held) > 1:
            self._differ(what, held)

    def least(self, what: str, value: int) -> int:
        """Return the smallest value that any rank holds; all ranks must call in the same order.

        Raises:
            AgreementError: some ranks did not come within the timeout.
        """
        return min(self._all(what, value))

    def most(self, what: str, value: int) -> int:
        """Return the largest value that any rank holds; otherwise as `least`."""
        return max(self._all(what, value))

    def texts(self, what: str, text: str) -> list[str]:
        """Return the text of every rank, by rank; all ranks must call in the same order.

        Args:
            what: what the ranks tell each other, for the message.
            text: this rank's own; of any length, though all ranks read all of them.

        Raises:
            AgreementError: ranks have come to something else, or not within the timeout.
        """
        if self.world_size == 1:
            return [text]
        held = self._exchange(what, f"{what}\0{text}")
        if any(each.partition("\0")[0] != what for each in held):
            self._differ(what, held)
        told = {rank: each.partition("\0")[2] for each, ranks in held.items() for rank in ranks}
        return [told[rank] for rank in range(self.world_size)]

    def _all(self, what: str, value: int) -> list[int]:
        return [int(text) for text in self.texts(what, str(value))]

    def _differ(self, what: str, held: dict[str, list[int]]) -> None:
        sides = "; ".join(
            f"ranks {ranks}: {value.replace(chr(0), ' = ')}" for value, ranks in held.items()
        )
        raise AgreementError(
            f"the ranks do not agree on {what}: {sides}. Give every rank the same model, "
            "config, passes and library versions"
        )

    def _exchange(self, what: str, text: str) -> dict[str, list[int]]:
        """Return all texts with the ranks that hold them."""
        ordinal = next(self._ordinal)
        store = dist.PrefixStore(
            f"torchloom/agree/{self._serial}/{ordinal}", _torch.default_store()
        )
        store.set(str(self.rank), text)
        texts, missing = _torch.texts_of(store, range(self.world_size), self.timeout_s)
        if missing:
            raise AgreementError(
                f"ranks {missing} did not reach {what!r} within {self.timeout_s:.0f} s: look at "
                "their output for an error, or for a branch that only some ranks take"
            )
        held: dict[str, list[int]] = defaultdict(list)
        for rank, each in texts.items():
            held[each].append(rank)
        return dict(held)


_SERIALS = itertools.count()


def new_agreement(rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> Agreement:
    """Return an agreement of its own; all ranks must make theirs in the same order."""
    return Agreement(rank, world_size, timeout_s, _serial=next(_SERIALS))
