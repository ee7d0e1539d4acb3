"""A rank's line to rank 0: a thread that speaks when this rank waits for long, and listens.

Ranks open their lines at the same point of the program. One that comes long before rank 0 goes on, and
its thread finds rank 0 when it is there.

While nobody waits it does nothing but look, four times a second. When a verdict comes it ends the
wait of the main thread, which then raises the verdict as its error.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from torchloom.log import get_logger
from torchloom.position import POSITION, Verdict, Wait
from torchloom.runtime.lines.breaking import interrupt_compilation, is_compiling
from torchloom.runtime.lines.report import Limits, idle_without_tags, report_of
from torchloom.runtime.lines.wire import NO_WORD, Wire

logger = get_logger(__name__)

LookUp = Callable[[], "tuple[str, int, str] | None"]

_TICK_S = 0.25
_OPEN_S, _OPEN_TICK_S = 3.0, 0.02
"""How long a rank waits for rank 0 to listen before it goes on, and how often it looks."""
PATIENCE_S = 1.0
"""A wait that lasts longer is looked into; a step in which ranks differ by less costs nothing."""
_REPEAT_S = 2.0
_DEAF_S = 4.5
"""Rank 0 asks at least every 3 s while a rank waits; after so long a silence it does not answer."""


class Line:
    """One rank's connection, in a thread of its own.

    Args:
        rank: this process's.
        look_up: where rank 0 listens and the token of the run, None while it does not yet.
        limits: how long this rank waits for others.
    """

    def __init__(self, rank: int, look_up: LookUp, limits: Limits) -> None:
        self.rank, self.limits = rank, limits
        self._look_up = look_up
        self._wire: Wire | None = None
        self._hub_gone, self._hub_gone_s = "", 0.0
        self._outbox: deque[dict[str, object]] = deque()
        """What the thread sends: the main thread never waits for a socket."""
        self._bell, self._knock = socket.socketpair()
        self._knock.setblocking(False)
        self._spoke_s, self._spoke_of = 0.0, 0.0
        self._heard_s = 0.0
        self._lost = ""
        self.gone: dict[int, str] = {}
        """Of ranks that have ended without a word: how that is told."""
        self._closing = threading.Event()
        self._judged = threading.Event()
        self._asked: list[str] = []
        self._wire = self._connect(_OPEN_S)
        self._thread = threading.Thread(target=self._run, name="torchloom-line", daemon=True)
        self._thread.start()

    def verdict_within(self, timeout_s: float) -> Verdict | None:
        """Have the ranks' positions judged now, and return the verdict if there is one in time."""
        if not self._judged.is_set():
            self._speak()
        deadline = time.monotonic() + timeout_s
        while not self._judged.wait(0.05) and time.monotonic() < deadline:
            if not self._thread.is_alive():
                break
        return POSITION.verdict

    def close(self, how: str) -> None:
        """Tell rank 0 how this rank ends, and end."""
        self._closing.set()
        if self._wire is not None:
            self._wire.send(kind="bye", how=how)
        self._thread.join(2.0)
        self.forget()

    def forget(self) -> None:
        """Let go of the connection; in a forked child without a word, as its parent keeps it."""
        if self._wire is not None:
            self._wire.close()
        self._bell.close()
        self._knock.close()

    def tell_digest(self, channel: str, step: int, digest: int) -> None:
        """Send a checksum of what this rank has begun in a group up to a step."""
        last = "" if POSITION.last is None else POSITION.last.text()
        self._outbox.append(
            {"kind": "digest", "channel": channel, "step": step, "digest": digest, "last": last}
        )

    def tell_graph(self, graph: str, state: str, words: str) -> None:
        """Send what became of a captured graph on this rank."""
        self._outbox.append({"kind": "graph", "graph": graph, "state": state, "words": words})
        with contextlib.suppress(OSError):
            self._knock.send(b"!")  # before the graph runs

    def _run(self) -> None:
        wire = self._wire = self._wire or self._connect(float("inf"))
        while wire is not None and not self._closing.is_set():
            if self._hub_gone:
                self._closing.wait(_TICK_S)
            else:
                self._await(wire)
            while self._outbox and not self._hub_gone:
                wire.send(**self._outbox.popleft())
            self._tick()

    def _await(self, wire: Wire) -> None:
        """Listen, until the next look at what this rank waits for or until it has something to say."""
        ears = select.poll()  # not select(), which knows no descriptor above 1023
        ears.register(wire, select.POLLIN)
        ears.register(self._bell, select.POLLIN)
        for descriptor, _ in ears.poll(1000 * _TICK_S):
            if descriptor == wire.fileno():
                self._listen(wire)
            else:
                self._bell.recv(1 << 10)

    def _connect(self, within_s: float) -> Wire | None:
        deadline = time.monotonic() + within_s
        while not self._closing.is_set() and time.monotonic() < deadline:
            try:
                found = self._look_up()
                if found is not None:
                    wire = Wire(socket.create_connection(found[:2], timeout=5.0))
                    wire.send(kind="hello", rank=self.rank, token=found[2])
                    return wire
            except (OSError, RuntimeError) as error:  # c10d's stores raise RuntimeError
                logger.debug("no line to rank 0: %s", error)
                return None
            self._closing.wait(_OPEN_TICK_S)
        return None

    def _listen(self, wire: Wire) -> None:
        messages = wire.receive()
        if messages is None:
            self._part_with_hub(NO_WORD)
            self._lost = self._lost or self._hub_gone
            return
        self._heard_s = time.monotonic()
        for message in messages:
            if message.get("kind") == "where":
                self._asked = [str(event) for event in message["asked"]]
                self._send("report")
            elif message.get("kind") == "verdict":
                self._settle(Verdict(*message["verdict"]))
            elif message.get("kind") == "gone":
                self._lost = f"rank {message['rank']} {message['how']}"
                self.gone[int(message["rank"])] = str(message["how"])
            elif message.get("kind") == "bye":
                self._part_with_hub(str(message["how"]))

    def _part_with_hub(self, how: str) -> None:
        self._hub_gone, self._hub_gone_s = f"rank 0 {how}", time.monotonic()
        self.gone[0] = how

    def _tick(self) -> None:
        wait, now = POSITION.waiting, time.monotonic()
        if self._lost and is_compiling() and POSITION.verdict is None:
            self._settle(
                Verdict(
                    "lost",
                    f"{self._lost}; rank {self.rank} is {POSITION.phase}, which "
                    "has nobody to communicate with. Look at the output of the other ranks for the "
                    "cause",
                )
            )
            interrupt_compilation()
            return
        if POSITION.verdict is not None:
            self._end_waits()  # the main thread may have come to one of torch's own since
            return
        if wait is None:
            if now - self._spoke_s > _REPEAT_S and idle_without_tags(PATIENCE_S):
                self._speak()
            return
        if now - wait.since_s < PATIENCE_S:
            return
        if self._hub_gone:
            # Its last messages may have come at this very moment.
            if 0 in wait.event.ranks and now - self._hub_gone_s > PATIENCE_S:
                self._settle(
                    Verdict(
                        "lost",
                        f"{self._hub_gone}; rank {self.rank} waits for it at {wait.event.text()}. "
                        "Look at the output of rank 0 for the cause",
                    )
                )
        elif self._is_deaf(wait, now):
            self._settle_deaf(wait)
        elif self._spoke_of != wait.since_s or now - self._spoke_s > _REPEAT_S:
            self._speak()

    def _is_deaf(self, wait: Wait, now: float) -> bool:
        """Whether rank 0, who should judge this wait, has not answered for too long."""
        is_late = now - wait.since_s > self._limit(wait)[0]
        return (
            is_late and self._wire is not None and now - max(self._heard_s, wait.since_s) > _DEAF_S
        )

    def _settle_deaf(self, wait: Wait) -> None:
        limit_s, key = self._limit(wait)
        self._settle(
            Verdict(
                "late",
                f"rank 0 does not answer (it was stopped, or something holds its interpreter), and "
                f"rank {self.rank} has waited for more than {limit_s:g} s ({wait.event.text()}). "
                f"Look at the output of rank 0, or raise {key}",
            )
        )

    def _limit(self, wait: Wait) -> tuple[float, str]:
        if wait.event.channel.startswith("agreement"):
            return self.limits.agree_s, "timeouts.agree_s"
        return self.limits.step_s, "timeouts.step_s"

    def _speak(self) -> None:
        wait = POSITION.waiting
        self._spoke_s, self._spoke_of = time.monotonic(), 0.0 if wait is None else wait.since_s
        self._send("stuck")

    def _send(self, kind: str) -> None:
        if self._wire is not None:
            report = report_of(self.rank, self._asked, self.limits)
            self._wire.send(kind=kind, report=report.to_plain())

    def _settle(self, verdict: Verdict) -> None:
        POSITION.verdict = verdict
        self._judged.set()
        self._end_waits()

    def _end_waits(self) -> None:
        for end_wait in list(POSITION.on_verdict):
            end_wait()
