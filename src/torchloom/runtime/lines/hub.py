"""Rank 0's end of all lines: asks where the ranks are when one of them waits, and judges.

    a rank waits for more than a second,
    or ends                               ->  everybody is asked for a report: a round
    the reports of a round have come      ->  `judge`, once
    two rounds find the same              ->  told to all

A report is good for its own round alone: a rank that waited a moment ago may have got what it waited for,
and the last messages of a rank that has ended may still be on their way. Nothing is asked, and nothing
sent, while no rank waits for long.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from typing import Any

from torchloom.files import from_plain
from torchloom.log import get_logger
from torchloom.position import Verdict
from torchloom.runtime.lines.judge import judge
from torchloom.runtime.lines.line import NO_WORD, Wire
from torchloom.runtime.lines.report import Report, silent_report

logger = get_logger(__name__)

_TICK_S = 0.2
_REMEMBERED = 1024
"""Things that ranks must have in common, of which the first report is kept: more than one rank is ahead of another."""
_UNLIKE = {
    "digest": "ranks did not begin the same collectives up to step {step}: {sides}. Weights may be wrong since; go back to "
    "the last checkpoint and look for a branch that only some ranks take",
    "graph": "one captured graph became different things: {sides}. A pass or compiler did not do the same on all ranks: "
    "mend it, leave the pass out with compile.disable_passes, or take another backend",
}
"""Messages about what must be equal on all ranks, and what is told where it differs."""
_LATEST_ROUND_S = 3.0
"""Rounds of questions become rarer while a wait lasts, up to this."""
_SILENT_S = 3.0
"""A rank that has not answered for so long is taken for one that does not come: others wait for it no
longer than their limits."""
_CONFIRM_S, _CONFIRM_OTHERS_S = 0.5, 3.0
"""How long ranks must stand as they are before they are said to differ or to be lost: in collectives of
ours, and where some of torch's are among them, whose partners are not known."""


class Hub:
    """Listens to the ranks, in a thread of its own."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wires: dict[int, Wire] = {}
        self._unknown: list[Wire] = []
        self._reports: dict[int, Report] = {}
        self._unanswered_s: dict[int, float] = {}
        """When each rank was first asked what it has not answered."""
        self._gone: dict[int, str] = {}
        self._said: dict[tuple[str, str], tuple[set[int], object, str]] = {}
        """Of what must be equal on all ranks, by kind and name: who said it, what it is, and that in words."""
        self._verdict: Verdict | None = None
        self._suspected: tuple[Verdict, float] | None = None
        self._next_round_s, self._pause_s = 0.0, _TICK_S
        self._is_asking, self._is_round_open = False, False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchloom-hub", daemon=True)
        self._thread.start()

    def close(self, how: str) -> None:
        """Tell the ranks how rank 0 ends, and end."""
        self._send(kind="bye", how=how)
        self._closing.set()
        self._thread.join(2.0)
        self.forget()
        self._selector.close()

    def forget(self) -> None:
        """Let go of all connections; in a forked child without a word, as its parent keeps them."""
        for wire in [*self._wires.values(), *self._unknown]:
            wire.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Wire):
                    self._hear(key.fileobj)
            self._look()

    def _accept(self) -> None:
        try:
            wire = Wire(self._listener.accept()[0])
        except OSError:
            return
        self._unknown.append(wire)
        self._selector.register(wire, selectors.EVENT_READ)

    def _hear(self, wire: Wire) -> None:
        messages = wire.receive()
        rank = next((rank for rank, each in self._wires.items() if each is wire), None)
        if messages is None:
            self._drop(wire)
            if rank is not None:
                del self._wires[rank]
                self._part_with(rank)
                if rank not in self._gone:
                    # A rank that compiles learns that its graph has nobody to communicate with.
                    self._gone[rank] = NO_WORD
                    self._send(kind="gone", rank=rank, how=NO_WORD)
            return
        for message in messages:
            if rank is None:
                rank = self._greet(wire, message)
            else:
                self._take(rank, message)

    def _drop(self, wire: Wire) -> None:
        self._selector.unregister(wire)
        wire.close()

    def _send(self, **message: Any) -> None:
        """Send a message to all ranks."""
        for wire in list(self._wires.values()):
            wire.send(**message)

    def _greet(self, wire: Wire, message: dict[str, Any]) -> int | None:
        if message.get("token") != self._token or wire not in self._unknown:
            self._drop(wire)
            return None
        rank = int(message["rank"])
        self._unknown.remove(wire)
        self._wires[rank] = wire
        if self._verdict is not None:
            wire.send(kind="verdict", verdict=list(self._verdict))
        return rank

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind", None)
        if kind == "bye":
            self._gone[rank] = str(message["how"])
            self._part_with(rank)
        elif kind in ("report", "stuck"):
            self._reports[rank] = from_plain(Report, message["report"])
            if kind == "stuck":
                self._begin_to_ask()
            else:
                self._unanswered_s.pop(rank, None)
        elif kind in _UNLIKE:
            self._compare(rank, kind, **message)

    def _part_with(self, rank: int) -> None:
        """Find out who waits for a rank that has ended, now that it has."""
        self._reports.pop(rank, None)
        self._unanswered_s.pop(rank, None)
        self._begin_to_ask()

    def _begin_to_ask(self) -> None:
        if not self._is_asking:
            self._is_asking, self._is_round_open = True, False
            self._pause_s, self._next_round_s = _TICK_S, 0.0

    def _look(self) -> None:
        if self._verdict is not None or not self._is_asking:
            return
        now = time.monotonic()
        if self._is_round_open and self._is_complete(now):
            self._is_round_open = False
            self._judge(now)
        if not self._is_round_open and now >= self._next_round_s and self._verdict is None:
            self._ask(now)

    def _running(self) -> set[int]:
        return self._wires.keys() - self._gone.keys()

    def _is_complete(self, now: float) -> bool:
        """Whether every rank has answered, or is silent."""
        waited = (self._unanswered_s.get(rank) for rank in self._running())
        return all(since is None or now - since > _SILENT_S for since in waited)

    def _ask(self, now: float) -> None:
        waits = [each.waiting for each in self._reports.values() if each.waiting is not None]
        asked = sorted({wait.event for wait in waits})
        for rank in self._running():
            self._unanswered_s.setdefault(rank, now)
            self._wires[rank].send(kind="where", asked=asked)
        self._is_round_open = True
        self._next_round_s = now + self._pause_s
        self._pause_s = min(_LATEST_ROUND_S, self._pause_s * 1.3)

    def _judge(self, now: float) -> None:
        """Judge what the ranks have answered in one round."""
        for rank in self._running() & self._unanswered_s.keys():
            self._reports[rank] = silent_report(rank, self._reports.values())
        if not any(each.waiting is not None for each in self._reports.values()):
            self._is_asking, self._suspected = False, None  # whoever waited goes on
            return
        found = judge(self._reports, self._gone)
        if found is None:
            self._suspected = None
        elif found.kind == "late":
            self._tell(found)
        elif self._suspected is None or self._suspected[0] != found:
            self._suspected = found, now
            self._pause_s, self._next_round_s = _TICK_S, now + _TICK_S
        else:
            others = any(each.blocked_in for each in self._reports.values())
            is_lost = found.kind == "lost"
            confirm_s = _CONFIRM_OTHERS_S if others and not is_lost else _CONFIRM_S
            if now - self._suspected[1] >= confirm_s:
                self._tell(found)

    def _tell(self, verdict: Verdict) -> None:
        self._verdict = verdict
        lines = [f"rank {rank} {how}" for rank, how in sorted(self._gone.items())]
        lines += [f"rank {rank} {each.text()}" for rank, each in sorted(self._reports.items())]
        if lines:
            logger.error("the run cannot go on; where its ranks are:\n  %s", "\n  ".join(lines))
        self._send(kind="verdict", verdict=list(verdict))

    def _compare(
        self, rank: int, kind: str, of: str, state: object, words: str, step: int = 0
    ) -> None:
        """End a run in which ranks say different things of what must be equal."""
        said = self._said.setdefault((kind, of), ({rank}, state, words))
        others = said[0] - {rank}
        if said[1] == state:
            said[0].add(rank)
        elif not others:
            self._said[kind, of] = {rank}, state, words
        elif self._verdict is None:
            pairs = sorted([(min(others), said[2]), (rank, words)])
            sides = "; ".join(f"rank {each} {text}" for each, text in pairs)
            self._tell(Verdict("differ", _UNLIKE[kind].format(step=step, sides=sides)))
        if len(self._said) > _REMEMBERED:
            del self._said[next(iter(self._said))]
