"""What one rank tells of its position, as plain data for the line to rank 0."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchloom.config.model import TimeoutsConfig
from torchloom.last_words import is_users
from torchloom.position import POSITION
from torchloom.runtime.channel import CHANNELS, Channel

_INSIDE = ("/torch/distributed/", "/torchloom/")
_COLLECTIVES = ("/distributed_c10d.py", "/_functional_collectives.py")
"""Files of torch whose functions wait for other ranks; its checkpoints, e.g., wait for disks."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a rank waits for."""

    event: str
    """Channel and key."""
    what: str
    ranks: list[int]
    for_s: float
    is_agreement: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank at one moment."""

    rank: int
    step: int = 0
    phase: str = ""
    waiting: Waiting | None = None
    begun: dict[str, bool] = field(default_factory=dict)
    """Whether this rank has begun each of the events that were asked about."""
    last: str = ""
    """What it began last."""
    blocked_in: str = ""
    """The call of torch.distributed that its main thread stands in, if any."""
    order: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Of groups whose messages carry no names: place, key and words of what has begun last."""
    updates: int = 0
    """How often its optimizers have stepped."""
    backwards: int = 0
    """How many backward passes its engines have run."""
    loads: int = 0
    """How many modules took weights from a state dict."""
    purpose: str = ""
    """What it gathers for, outside of training."""
    rates: str = ""
    """What its optimizer steps with."""
    notes: list[str] = field(default_factory=list)
    limits: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    is_silent: bool = False
    """Made by rank 0, as this rank's thread does not answer."""

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Report:
        """Read the report that `dataclasses.asdict` made a JSON-able dict of."""
        waiting, limits = plain["waiting"], TimeoutsConfig(**plain["limits"])
        order = {name: [tuple(each) for each in rows] for name, rows in plain["order"].items()}
        found = waiting and Waiting(**waiting)
        own: dict[str, Any] = {**plain, "waiting": found, "limits": limits, "order": order}
        return Report(**own)

    def text(self) -> str:
        """Say in words where the rank is."""
        if self.is_silent:
            return "does not answer (it was stopped, or something holds its interpreter)"
        place = f"is in step {self.step}"
        if self.waiting is not None:
            place = f"waits for {self.waiting.what}"
        elif self.phase:
            place = f"is {self.phase}, in step {self.step}"
        elif self.blocked_in:
            place = f"is in {self.blocked_in}, in step {self.step}"
        elif self.last:
            place = f"is outside of torchloom; the last that it began was {self.last}"
        return "; ".join([place, *self.notes])


def report_of(rank: int, asked: Iterable[str], limits: TimeoutsConfig) -> Report:
    """Return where this process is, and which events it has begun."""
    wait, now = POSITION.waiting, time.monotonic()
    waiting = None
    if wait is not None:
        event = wait.event
        waiting = Waiting(
            event=f"{event.channel}:{event.key}",
            what=event.text(),
            ranks=list(event.ranks),
            for_s=now - wait.since_s,
            is_agreement=event.channel.startswith("agreement"),
        )
    return Report(
        rank=rank,
        step=POSITION.step,
        phase=POSITION.phase,
        waiting=waiting,
        begun={event: _has_begun(event) for event in asked},
        last="" if POSITION.last is None else POSITION.last.text(),
        blocked_in="" if wait is not None else blocked_in(),
        order={name: _order(each) for name, each in CHANNELS.items() if not each.has_tags},
        updates=POSITION.updates,
        backwards=POSITION.backwards,
        loads=POSITION.loads,
        purpose=POSITION.purpose,
        rates=POSITION.rates.text(),
        notes=list(POSITION.notes.values()),
        limits=limits,
    )


def limit_of(limits: TimeoutsConfig, is_agreement: bool, phase: str = "") -> tuple[float, str]:
    """Return how long to wait for a rank that is in a phase, in seconds, and the config key that sets it."""
    kind = "compile_s" if phase else "agree_s" if is_agreement else "step_s"
    return getattr(limits, kind), f"timeouts.{kind}"


def idle_without_tags(patience_s: float) -> bool:
    """Say whether a group whose messages carry no names has begun nothing for a while."""
    now = time.monotonic()
    return any(
        each.recent and now - each.begun_s > patience_s
        for each in list(CHANNELS.values())
        if not each.has_tags
    )


def _order(channel: Channel) -> list[tuple[int, int, str]]:
    entries = list(channel.recent)
    first = channel.num_begun - len(entries)
    return [(first + index, each.key, each.text()) for index, each in enumerate(entries)]


def _has_begun(event: str) -> bool:
    name, _, key = event.rpartition(":")
    channel = CHANNELS.get(name)
    return channel is not None and int(key) in channel.begun


def blocked_in() -> str:
    """Return the call of torch.distributed that the main thread stands in, with the user's line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.endswith(_COLLECTIVES):
        return ""
    name = frame.f_code.co_name
    while frame is not None and any(part in frame.f_code.co_filename for part in _INSIDE):
        name = frame.f_code.co_name if "wrapper" not in frame.f_code.co_name else name
        frame = frame.f_back
    users = frame
    while users is not None and not is_users(users.f_code.co_filename):
        users = users.f_back
    frame = users or frame
    where = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
    return f"torch.distributed.{name}{where}"


def silent_report(rank: int, others: Iterable[Report]) -> Report:
    """Return the report of a rank whose thread does not answer: it has begun nothing."""
    asked = {each.waiting.event for each in others if each.waiting is not None}
    return Report(rank=rank, begun=dict.fromkeys(asked, False), is_silent=True)
