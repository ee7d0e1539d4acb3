"""Lets ranks tell each other short texts outside of collectives, and compare facts before they run.

A collective would hang in just the case that this is for: a rank that failed, or took another branch.
Each text travels with the name of what it is about. Ranks that call in different orders therefore get
an error that shows both names, never each other's texts.

    Exchange       how texts travel: `StoreExchange` over a key-value store, `Alone` for one rank
    Agreement      compares facts over an exchange: differing programs become an error, not a hang
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch.distributed as dist

from torchloom._torch.distributed import hushed_store
from torchloom.errors import AgreementError

_SHOWN = 500
"""Characters of one rank's value in an error: a cost table of 100 kB would hide the sentence."""
_POLL_S, _MOST_POLL_S = 0.0005, 0.05
"""How often a rank looks for what others say; rarer while it waits."""


class Exchange(Protocol):
    """Passes short texts between ranks; all ranks must call in the same order."""

    @property
    def rank(self) -> int:
        """This rank's place among those that take part."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        ...

    def texts(self, what: str, text: str) -> list[str]:
        """Tell all ranks a text, and return the text of every rank, by rank.

        Args:
            what: what the ranks tell each other; equal on all ranks, and shown in errors.
            text: this rank's own; of any length, though all ranks read all of them.

        Raises:
            AgreementError: ranks have come to something else, or not in time.
        """
        ...


@final
class Alone:
    """One rank, which tells itself what it says; see `Exchange`."""

    rank = 0
    world_size = 1

    def texts(self, what: str, text: str) -> list[str]:
        """Return this rank's text."""
        del what
        return [text]


def named(what: str, text: str) -> str:
    """Return the text as it travels: with the name of what it is about."""
    return f"{what}\0{text}"


def unnamed(what: str, told: Iterable[str]) -> list[str]:
    """Take the names off what ranks have told.

    Args:
        what: the name that all must have.
        told: what has travelled, by rank.

    Raises:
        AgreementError: a rank told something of another name.
    """
    parts = [each.split("\0", 1) for each in told]
    if any(name != what for name, _ in parts):
        raise differ(what, (f"{name} = {text}" for name, text in parts))
    return [text for _, text in parts]


def differ(what: str, values: Iterable[str]) -> AgreementError:
    """Return the error for ranks that hold different values.

    Args:
        what: what was compared.
        values: of the ranks, by rank.
    """
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        more = f"... ({len(value)} characters)" if len(value) > _SHOWN else ""
        sides[f"{value[:_SHOWN]}{more}"].append(rank)
    shown = "; ".join(f"ranks {ranks}: {value}" for value, ranks in sides.items())
    return AgreementError(
        f"the ranks do not agree on {what}: {shown}. Give every rank the same model, "
        "config, passes and library versions"
    )


def late(what: str, missing: list[int], timeout_s: float) -> Exception:
    """Return the error for ranks that did not come; exchanges may bring their own.

    Args:
        what: what the others had come to.
        missing: the ranks that had not.
        timeout_s: how long this rank waited, in seconds.
    """
    del timeout_s
    return AgreementError(
        f"ranks {missing} did not reach {what!r} in time: look at their output for an "
        "error, or for a branch that only some ranks take"
    )


class RankWatch(Protocol):
    """Notices, while a rank waits for the others, that one of them has ended."""

    def waits(self, what: str) -> AbstractContextManager[None]:
        """Say for the length of a `with` block what this rank waits for; explain a lost store."""
        ...

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Raise if the run is known not to go on, or one of the missing ranks not to come."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class StoreExchange:
    """Ranks that reach one key-value store, in 0.3-2 ms for two ranks; see `Exchange`.

    Each exchange has a prefix that nothing else uses, and each call a number below it, so texts of different
    calls never meet. A rank polls the store instead of waiting in it: a wait inside of the store would let no
    signal through until it ends.
    """

    rank: int
    world_size: int
    prefix: str
    """Of the keys: equal on all ranks, and used for nothing else."""
    store: Callable[[], Any]
    """Returns the store; asked at each call, as a process group may be destroyed and made again."""
    timeout_s: Callable[[], float]
    """Returns how long ranks may lag behind, in seconds."""
    late: Callable[[str, list[int], float], Exception] = late
    """Makes the error for ranks that did not come: (what, missing ranks, seconds waited)."""
    watch: RankWatch | None = None
    _ordinal: itertools.count[int] = field(default_factory=itertools.count, init=False)

    def texts(self, what: str, text: str) -> list[str]:
        """Tell all ranks a text, and return theirs; see `Exchange.texts`."""
        store: Any = dist.PrefixStore(f"{self.prefix}/{next(self._ordinal)}", self.store())
        keys = [str(rank) for rank in range(self.world_size)]
        with self.watch.waits(what) if self.watch else nullcontext(), hushed_store():
            store.set(keys[self.rank], named(what, text))
            self._await(store, what, keys)
            if store.has_extended_api():  # one request instead of one for each rank
                values = store.multi_get(keys)
            else:
                values = [store.get(key) for key in keys]
        return unnamed(what, (bytes(value).decode() for value in values))

    def _await(self, store: Any, what: str, keys: list[str]) -> None:
        timeout_s = self.timeout_s()
        pause_s, deadline = _POLL_S, time.monotonic() + timeout_s

        def missing() -> list[int]:
            return [int(key) for key in keys if not store.check([key])]

        while not store.check(keys):
            if self.watch is not None:
                self.watch.look(missing)
            if time.monotonic() > deadline:
                raise self.late(what, missing(), timeout_s)
            time.sleep(pause_s)
            pause_s = min(_MOST_POLL_S, pause_s * 1.5)


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
        held = self.texts(what, text)
        if len(set(held)) > 1:
            raise differ(what, (f"{what} = {each}" for each in held))

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
        values = {
            name: [json.dumps(each[name]) if name in each else "not there" for each in held]
            for name in dict.fromkeys(name for each in held for name in each)
        }
        first, *others = [name for name, each in values.items() if len(set(each)) > 1]
        more = f" (and on {len(others)} more)" if others else ""
        raise differ(f"{what}: {first}{more}", values[first])

    def least(self, what: str, value: int) -> int:
        """Return the smallest value that any rank holds.

        Raises:
            AgreementError: some ranks did not come within the timeout.
        """
        return min(map(int, self.texts(what, str(value))))

    def most(self, what: str, value: int) -> int:
        """Return the largest value that any rank holds; otherwise as `least`."""
        return max(map(int, self.texts(what, str(value))))

    def texts(self, what: str, text: str) -> list[str]:
        """Return the text of every rank, by rank; see `Exchange.texts`."""
        return self.exchange.texts(what, text)
