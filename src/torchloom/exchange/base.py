"""What an exchange of texts must do, and what all exchanges have in common.

Each text travels with the name of what it is about. Ranks that call in different orders therefore get
an error that shows both names, never each other's texts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol, final

from torchloom.errors import AgreementError

_SHOWN = 500
"""Characters of one rank's value in an error: a cost table of 100 kB would hide the sentence."""


class Exchange(Protocol):
    """Passes short texts between ranks; all ranks must call the same methods in the same order."""

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

    def tell(self, what: str, text: str) -> None:
        """Tell all ranks a text without waiting for them; they call `hear`."""
        ...

    def hear(self, what: str, rank: int) -> str:
        """Return what another rank says by `tell`.

        Raises:
            AgreementError: it has come to something else, or not in time.
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

    def tell(self, what: str, text: str) -> None:
        """Tell nobody."""

    def hear(self, what: str, rank: int) -> str:
        """Refuse: there is no other rank."""
        raise AssertionError(f"one rank alone was asked what rank {rank} says of {what!r}")


def text_from(exchange: Exchange, source: int, what: str, make: Callable[[], str]) -> str:
    """Let one rank make a text, and return it on every rank.

    Args:
        exchange: between the ranks, which must all call.
        source: the rank that makes the text; it does not wait for the others.
        what: what is made, for messages.
        make: called on `source` alone; what it raises there is raised on all ranks.

    Raises:
        AgreementError: `source` did not come, or failed.
    """
    if exchange.rank != source:
        answer = json.loads(exchange.hear(what, source))
        if "error" in answer:
            raise AgreementError(f"another rank could not give {what}: {answer['error']}")
        return answer["text"]
    try:
        text = make()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        exchange.tell(what, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    exchange.tell(what, json.dumps({"text": text}))
    return text


def named(what: str, text: str) -> str:
    """Return the text as it travels: with the name of what it is about."""
    return f"{what}\0{text}"


def unnamed(what: str, told: Mapping[int, str]) -> dict[int, str]:
    """Take the names off what ranks have told.

    Args:
        what: the name that all must have.
        told: what has travelled, by rank.

    Raises:
        AgreementError: a rank told something of another name.
    """
    parts = {rank: each.partition("\0") for rank, each in told.items()}
    if any(name != what for name, _, _ in parts.values()):
        sides = defaultdict(list)
        for rank, (name, _, text) in parts.items():
            sides[f"{name} = {text}"].append(rank)
        raise differ(what, sides)
    return {rank: text for rank, (_, _, text) in parts.items()}


def differ(what: str, sides: Mapping[str, list[int]]) -> AgreementError:
    """Return the error for ranks that hold different values.

    Args:
        what: what was compared.
        sides: each value with the ranks that hold it.
    """
    shown = "; ".join(f"ranks {ranks}: {_shortened(value)}" for value, ranks in sides.items())
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


def _shortened(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
