"""Connects a rank to rank 0 by a thread that speaks when this rank waits for long, listens, and ends waits.

Ranks open their lines at the same point of the program. One that comes long before rank 0 goes on, and
its thread finds rank 0 when it is there.

While nobody waits the thread does nothing but look, four times a second. When a verdict comes it ends what the main
thread stands in, which then raises the verdict as its error: a compilation by a signal, a wait inside gloo by breaking
its connections. Gloo takes no call back: a receive that times out puts every connection of its group into an error
state (gloo's UnboundBuffer::waitRecv), and whoever waits in one, on this rank or another, then raises. NCCL's kernels,
which hold up the device and with it whoever asks for a result, end when their communicators are aborted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchloom._torch.distributed import abort
from torchloom.config.model import TimeoutsConfig
from torchloom.errors import ShardError
from torchloom.log import get_logger
from torchloom.position import POSITION, Verdict, Wait
from torchloom.runtime.base import GroupRef, carried_by_gloo
from torchloom.runtime.channel import CHANNELS
from torchloom.runtime.lines.report import blocked_in, idle_without_tags, limit_of, report_of

_MOST_BYTES = 1 << 20
_IDLE_S, _PROBE_S, _PROBES = 2, 1, 4
"""A host that cannot be reached is noticed after 2 + 4 * 1 s; a shorter break is survived."""
NO_WORD = "has ended without a word (killed, out of memory, or its host cannot be reached)"
"""What is told of a rank whose connection has ended, but for those that say goodbye."""


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._read = b""
        connection.settimeout(5.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _PROBE_S),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _PROBE_S * _PROBES)),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._socket.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; return whether the connection stands."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, None where the connection has ended."""
        try:
            data = self._socket.recv(1 << 16)
        except (TimeoutError, InterruptedError):
            return []
        except OSError:
            return None
        if not data or len(self._read) > _MOST_BYTES:
            return None
        *lines, self._read = (self._read + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return found if all(isinstance(each, dict) for each in found) else None

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


_NEVER_SENT = (1 << 29) + 7
"""A tag that no message has: those of collectives have bit 30."""


def end_waits_with_verdict(ref: GroupRef) -> None:
    """Let a verdict end the waits of a group's ranks in this process."""
    by_gloo = carried_by_gloo(ref())

    def end() -> None:
        if by_gloo:
            _break(ref)
        else:
            POSITION.on_verdict.remove(end)  # a communicator is aborted once
            with contextlib.suppress(
                ShardError, RuntimeError
            ):  # the group is gone, or its backend cannot
                abort(ref())

    POSITION.on_verdict.append(end)


def _break(ref: GroupRef) -> None:
    try:
        group = ref()
    except ShardError:
        return
    wait = POSITION.waiting
    if wait is None and not blocked_in():
        return  # the main thread meets the verdict when it next communicates
    channel = None if wait is None else CHANNELS.get(wait.event.channel)
    if channel is not None and channel.polls_verdict:
        return
    with contextlib.suppress(RuntimeError):  # the time-out, or a connection that is broken already
        never = group.recv([torch.empty(1)], (ref.rank + 1) % ref.size, _NEVER_SENT)
        never.wait(timedelta(milliseconds=1))


def is_compiling() -> bool:
    """Whether this rank compiles a graph, which needs the other ranks as soon as it runs."""
    return POSITION.phase.startswith("compiling")


def let_compilations_be_interrupted() -> None:
    """Let `interrupt_compilation` reach the main thread, also in a call that sleeps or waits.

    By SIGURG, which nothing happens at by default; a handler of the program's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
        signal.signal(signal.SIGURG, _raise_verdict)


def interrupt_compilation() -> None:
    """Raise the verdict in the main thread."""
    if signal.getsignal(signal.SIGURG) is _raise_verdict:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)


def _raise_verdict(number: int, frame: object) -> None:
    if POSITION.verdict is not None and is_compiling():
        raise POSITION.verdict.error()


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

    def __init__(self, rank: int, look_up: LookUp, limits: TimeoutsConfig) -> None:
        self.rank, self.limits = rank, limits
        self._look_up = look_up
        self._wire: Wire | None = None
        self._hub_gone, self._hub_gone_s = "", 0.0
        self._outbox: deque[dict[str, object]] = deque()
        """What the thread sends, so that the main thread waits for no socket in a step."""
        self._spoke_s, self._spoke_of = 0.0, 0.0
        self._last_message_s = 0.0
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

    def tell(self, *, at_once: bool = False, **message: object) -> None:
        """Send a message to rank 0; nothing waits for an answer.

        Args:
            at_once: send it here, outside of a step; this takes as long as the socket does.
            message: of a `kind` that the hub knows.
        """
        if self._wire is None or not at_once or not self._wire.send(**message):
            self._outbox.append(message)

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
        """Listen, until the next look at what this rank waits for."""
        poller = select.poll()  # not select(), which knows no descriptor above 1023
        poller.register(wire, select.POLLIN)
        if poller.poll(1000 * _TICK_S):
            self._listen(wire)

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
        self._last_message_s = time.monotonic()
        for message in messages:
            if message.get("kind") == "where":
                self._asked = [str(event) for event in message["asked"]]
                self._send("report")
            elif message.get("kind") == "verdict":
                self._settle(*message["verdict"])
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
        if POSITION.verdict is not None:
            self._end_waits()  # the main thread may have come to one of torch's own since
        elif self._lost and is_compiling():
            self._settle(
                "lost",
                f"{self._lost}; rank {self.rank} is {POSITION.phase}, which "
                "has nobody to communicate with. Look at the output of the other ranks for the "
                "cause",
            )
            interrupt_compilation()
        elif wait is None:
            if now - self._spoke_s > _REPEAT_S and idle_without_tags(PATIENCE_S):
                self._speak()
        elif now - wait.since_s > PATIENCE_S:
            self._tick_in_wait(wait, now)

    def _tick_in_wait(self, wait: Wait, now: float) -> None:
        limit_s, key = limit_of(self.limits, wait.event.channel.startswith("agreement"))
        silent_s = now - max(self._last_message_s, wait.since_s)
        if self._hub_gone:
            # Its last messages may have come at this very moment.
            if 0 in wait.event.ranks and now - self._hub_gone_s > PATIENCE_S:
                self._settle(
                    "lost",
                    f"{self._hub_gone}; rank {self.rank} waits for it at {wait.event.text()}. "
                    "Look at the output of rank 0 for the cause",
                )
        elif self._wire is not None and now - wait.since_s > limit_s and silent_s > _DEAF_S:
            self._settle(
                "late",
                f"rank 0 does not answer (it was stopped, or something holds its interpreter), and "
                f"rank {self.rank} has waited for more than {limit_s:g} s ({wait.event.text()}). "
                f"Look at the output of rank 0, or raise {key}",
            )
        elif self._spoke_of != wait.since_s or now - self._spoke_s > _REPEAT_S:
            self._speak()

    def _speak(self) -> None:
        wait = POSITION.waiting
        self._spoke_s, self._spoke_of = time.monotonic(), 0.0 if wait is None else wait.since_s
        self._send("stuck")

    def _send(self, kind: str) -> None:
        if self._wire is not None:
            report = report_of(self.rank, self._asked, self.limits)
            self._wire.send(kind=kind, report=dataclasses.asdict(report))

    def _settle(self, kind: Any, text: str) -> None:
        POSITION.verdict = Verdict(kind, text)
        self._judged.set()
        self._end_waits()

    def _end_waits(self) -> None:
        for end_wait in list(POSITION.on_verdict):
            end_wait()
