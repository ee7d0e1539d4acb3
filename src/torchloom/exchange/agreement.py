"""Ranks agree before they run: differing programs become an error, not a hang."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchloom.exchange.base import Exchange, differ


@dataclass(frozen=True)
class Agreement:
    """Compares texts between ranks. All ranks must call the same methods in the same order."""

    exchange: Exchange

    @property
    def rank(self) -> int:
        """This rank's place among those that agree."""
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        """How many ranks agree."""
        return self.exchange.world_size

    def check(self, what: str, text: str) -> None:
        """Raise on every rank unless all ranks hold the same text.

        Args:
            what: what is compared, for the message.
            text: this rank's value; short, as it is shown when ranks differ.

        Raises:
            AgreementError: ranks differ, or some did not come within the timeout.
        """
        sides = _sides(f"{what} = {held}" for held in self.texts(what, text))
        if len(sides) > 1:
            raise differ(what, sides)

    def check_facts(self, what: str, facts: Mapping[str, object]) -> None:
        """Raise on every rank unless all ranks hold the same facts; the error names the first difference.

        Args:
            what: what is compared, for the message.
            facts: plain data by name.

        Raises:
            AgreementError: ranks differ, or some did not come within the timeout.
        """
        text = json.dumps(facts, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if len(set(self.texts(what, digest))) == 1:
            return
        held = [json.loads(each) for each in self.texts(f"{what}, in full", text)]
        names = dict.fromkeys(name for each in held for name in each)
        differing = [name for name in names if len(_sides_of(held, name)) > 1]
        more = f" (and on {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise differ(f"{what}: {differing[0]}{more}", _sides_of(held, differing[0]))

    def least(self, what: str, value: int) -> int:
        """Return the smallest value that any rank holds.

        Raises:
            AgreementError: some ranks did not come within the timeout.
        """
        return min(self._all(what, value))

    def most(self, what: str, value: int) -> int:
        """Return the largest value that any rank holds; otherwise as `least`."""
        return max(self._all(what, value))

    def texts(self, what: str, text: str) -> list[str]:
        """Return the text of every rank, by rank; see `Exchange.texts`."""
        return self.exchange.texts(what, text)

    def _all(self, what: str, value: int) -> list[int]:
        return [int(text) for text in self.texts(what, str(value))]


def _sides(values: Iterable[str]) -> dict[str, list[int]]:
    """Return each value, given by rank, with the ranks that hold it."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        sides[value].append(rank)
    return dict(sides)


def _sides_of(held: Sequence[Mapping[str, object]], name: str) -> dict[str, list[int]]:
    """Return each value of one fact with the ranks that hold it."""
    return _sides(json.dumps(each[name]) if name in each else "not there" for each in held)
