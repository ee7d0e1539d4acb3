"""Ranks agree before they run: differing programs become an error, not a hang.

The ranks compare short texts through the process group's key-value store. Nothing is exchanged by a
collective, which would hang in just the case that this is for. Costs 0.3-2 ms for two ranks. A rank
that waits here is seen by the others as waiting for what it compares (`runtime.lines`), so a rank that
has come to something else, or has ended, is an error within seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from torchloom._torch.distributed import default_store
from torchloom._torch.hush import hushed_store
from torchloom.errors import AgreementError
from torchloom.position import POSITION, Verdict, Wait
from torchloom.runtime.channel import Channel, error_of, label
from torchloom.runtime.lines import explained, longest_s, open_lines

_POLL_S, _MOST_POLL_S = 0.0005, 0.05
"""How often a rank looks for what others say; rarer while it waits."""


@dataclass
class Agreement:
    """Compares texts between all ranks of the default process group."""

    rank: int
    world_size: int
    timeout_s: float | None = None
    """How long a rank may lag behind; None leaves it to `timeouts.agree_s`."""
    _ordinal: itertools.count[int] = field(default_factory=itertools.count)
    _serial: int = 0
    _keys: list[str] = field(init=False)
    _channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self._keys = [str(rank) for rank in range(self.world_size)]
        self._channel = Channel(
            f"agreement {self._serial}", tuple(range(self.world_size)), looks=True
        )
        if self.world_size > 1:
            open_lines()

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
        differing = [name for name in names if len(_sides(held, name)) > 1]
        more = f" (and on {len(differing) - 1} more)" if len(differing) > 1 else ""
        self._differ(f"{what}: {differing[0]}{more}", _sides(held, differing[0]))

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
        store = dist.PrefixStore(f"torchloom/agree/{self._serial}/{ordinal}", default_store())
        entry = self._channel.begin(label(f"agreement on {what}"))
        POSITION.waiting = Wait(entry, time.monotonic())
        try:
            with hushed_store():
                store.set(str(self.rank), text)
                self._await(store, what)
                texts = _read(store, self._keys)
        except dist.DistError as error:
            raise explained(entry, _store_lost(what, error)) from None
        finally:
            POSITION.waiting = None
        held: dict[str, list[int]] = defaultdict(list)
        for rank, told in enumerate(texts):
            held[told].append(rank)
        return dict(held)

    def _await(self, store: Any, what: str) -> None:
        """Return when all ranks have spoken."""
        pause_s, deadline = _POLL_S, time.monotonic() + (self.timeout_s or longest_s())
        while not store.check(self._keys):
            if POSITION.verdict is not None:
                raise error_of(POSITION.verdict)
            if time.monotonic() > deadline:
                missing = [int(key) for key in self._keys if not store.check([key])]
                raise AgreementError(
                    f"ranks {missing} did not reach {what!r} in time: look at their output for an "
                    "error, or for a branch that only some ranks take"
                )
            time.sleep(pause_s)
            pause_s = min(_MOST_POLL_S, pause_s * 1.5)


def _read(store: Any, keys: list[str]) -> list[str]:
    """Return the texts of all ranks; by one request, where the store can, as each rank makes them."""
    if store.has_extended_api():
        return [bytes(told).decode() for told in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


def _store_lost(what: str, error: Exception) -> Verdict:
    return Verdict(
        "lost",
        f"the key-value store of the run cannot be reached ({str(error).splitlines()[0]}) while "
        f"ranks agree on {what}: the process that hosts it has ended, or its host cannot be "
        "reached; look at the output of rank 0 and of the launcher",
    )


def _sides(held: Sequence[Mapping[str, object]], name: str) -> dict[str, list[int]]:
    """Return each value of one fact with the ranks that hold it."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(held):
        sides[json.dumps(each[name]) if name in each else "not there"].append(rank)
    return dict(sides)


_SERIALS = itertools.count()


def new_agreement(rank: int, world_size: int, timeout_s: float | None = None) -> Agreement:
    """Return an agreement of its own; all ranks must make theirs in the same order."""
    return Agreement(rank, world_size, timeout_s, _serial=next(_SERIALS))
