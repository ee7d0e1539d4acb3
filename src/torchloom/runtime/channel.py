"""Named traffic: what the ranks of one group do together, each with a name, a number and its bytes.

    label    what is done: operation, names of tensors, bytes
    entry    one time that it is done: the label, how often it was done before, in which step
    key      a number made of both, equal on ranks that have come to the same

Messages carry the key as their tag, shared memory as its marks, so ranks that run different programs
never take each other's bytes for their own. Beginning an entry costs about 1 us (a crc32 and a
dictionary).
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchloom.ops.replays import again, never
from torchloom.position import POSITION

_REMEMBERED = 4096
"""Entries of a group that are known to have begun: more than any rank can be ahead of another."""
_COMPARED = 64
"""Entries of a group without tags that ranks compare one by one where the run stands still."""
_NUMBERS = struct.Struct("<8Q")


class Label(NamedTuple):
    """What ranks do together."""

    op: str
    names: tuple[str, ...]
    dtype: str
    num_bytes: int
    model: int
    """Of several models whose parameters have equal names, which one; 0 is the first."""
    seed: int
    """A checksum of all of it."""

    def text(self) -> str:
        """Say in words what it is."""
        names = self.names
        if not names:
            return self.op + self._model()
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} in all)"
        if len(names) == 2:
            shown = f"{names[0]} and {names[1]}"
        return f"{self.op} of {shown}{self._model()}, {self.num_bytes} bytes"

    def _model(self) -> str:
        return f" of model {self.model + 1}" if self.model else ""


_LABELS: dict[tuple[str, tuple[str, ...], str, int, int], Label] = {}


def label(
    op: str, names: Sequence[str] = (), dtype: object = "", num_bytes: int = 0, model: int = 0
) -> Label:
    """Return a label; equal arguments give the same object.

    Args:
        op: the operation in words, such as "gather".
        names: of the tensors.
        dtype: in which they travel.
        num_bytes: of the full tensors.
        model: of several models with equal names, which one; 0 is the first.
    """
    key = (op, tuple(names), str(dtype), num_bytes, model)
    known = _LABELS.get(key)
    if known is None:
        known = _LABELS[key] = Label(*key, zlib.crc32(repr(key).encode()))
    return known


class NamedCollective(NamedTuple):
    """One time that a group of ranks does something together."""

    label: Label
    number: int
    """How often this group had done it before."""
    step: int
    key: int
    channel: str
    ranks: tuple[int, ...]
    actor: int
    purpose: str = ""

    def text(self) -> str:
        """Say in words what it is."""
        # All that the key is made of, or two ranks that differ would be told the same; how often and
        # with what optimizers stepped, which is in it too, is told where it differs (`lines.judge`).
        engine = f" of engine {self.actor}" if self.actor > 1 else ""
        purpose = f", {self.purpose}" if self.purpose else ""
        return (
            f"{self.label.text()}, number {self.number + 1}, in step {self.step}{engine}{purpose}"
        )

    @property
    def tag(self) -> int:
        """A number for messages, of 30 bits and apart from the small tags of user code."""
        return 1 << 30 | self.key & (1 << 30) - 1


@dataclass(eq=False)
class Channel:
    """What one group of ranks does together, in the order of this rank."""

    name: str
    """Equal on all ranks of the group, different for any other group."""
    ranks: tuple[int, ...]
    """Global ranks, by their rank in the group."""
    has_tags: bool = True
    """Whether messages carry keys; else ranks compare checksums once a step."""
    polls_verdict: bool = False
    """Whether those who wait look for a verdict by themselves; else their wait has to be ended."""
    recent: deque[NamedCollective] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    """Without tags: what has begun last, for a comparison in words."""
    begun_s: float = 0.0
    """Without tags: when something last began."""
    begun: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Keys of what this rank has begun."""
    num_begun: int = 0
    num_told: int = 0
    """Without tags: how often `rolling` was reported."""
    rolling: int = 0
    """A checksum over all keys in order, for transports whose messages cannot carry them."""
    _numbers: dict[Label, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        CHANNELS[self.name] = self

    def begin(self, what: Label) -> NamedCollective:
        """Note that this rank begins something.

        Raises:
            AgreementError: the ranks are known to run different programs.
            PeerLostError: one of the ranks is known to have ended.
        """
        if POSITION.verdict is not None:
            raise POSITION.verdict.error()
        again(self.begin, what)
        if self.has_tags:
            never("gloo and shared memory carry its collectives, on the host")
        number = self._numbers.get(what, 0)
        self._numbers[what] = number + 1
        step = POSITION.step
        actor = POSITION.actor
        done = POSITION.updates, POSITION.backwards, POSITION.loads, POSITION.rates.key
        purpose = POSITION.purpose
        numbers = _NUMBERS.pack(number, step, actor, zlib.crc32(purpose.encode()), *done)
        key = zlib.crc32(numbers, what.seed)
        self.begun.append(key)
        self.num_begun += 1
        self.rolling = zlib.crc32(key.to_bytes(4, "little"), self.rolling)
        POSITION.last = entry = NamedCollective(
            what, number, step, key, self.name, self.ranks, actor, purpose
        )
        if not self.has_tags:
            self.recent.append(entry)
            self.begun_s = time.monotonic()
        return entry


CHANNELS: dict[str, Channel] = {}
"""The channels of this process, by name."""
