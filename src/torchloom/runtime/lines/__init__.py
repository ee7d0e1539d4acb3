"""Lines between the ranks of a run, for the case that it cannot go on.

Every rank has a connection to rank 0 beside the process group. A rank that waits for more than a
second says what it waits for; rank 0 asks all where they are and, where the wait cannot end, tells all
the same sentence. A connection also shows at once that a process or a host is gone.

    open_lines    once per process group, by whoever first communicates
    wait_for      waits for messages, and turns what breaks them into that sentence
    explained     the error to raise where something between ranks has failed

Source of the idea that a run's end must name ranks and tensors: the flight recorder of NCCL, which
shows sequence numbers (pytorch/pytorch, torch/distributed/flight_recorder).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchloom import envs
from torchloom._torch.distributed import own_store
from torchloom.config.model import TimeoutsConfig
from torchloom.errors import TorchloomError
from torchloom.last_words import tell_at_the_end
from torchloom.log import get_logger
from torchloom.position import POSITION, SyncPoint, Verdict, Wait
from torchloom.runtime.base import GroupRef
from torchloom.runtime.channel import CHANNELS, NamedCollective, label
from torchloom.runtime.lines.hub import Hub
from torchloom.runtime.lines.line import (
    Line,
    end_waits_with_verdict,
    let_compilations_be_interrupted,
)

__all__ = [
    "broken",
    "end_waits_with_verdict",
    "explained",
    "how_gone",
    "longest_s",
    "open_lines",
    "set_limits",
    "tell_graph",
    "tell_step",
    "wait_for",
]

logger = get_logger(__name__)

_VERDICT_S = 6.0
"""How long an error waits for the sentence that explains it: rank 0 takes 1 to 3 s."""


class _Lines:
    """The lines of this process."""

    def __init__(self) -> None:
        self.group: GroupRef | None = None
        self.hub: Hub | None = None
        self.line: Line | None = None
        self.limits = TimeoutsConfig()
        self.num_opened = 0

    def close(self, how: str) -> None:
        """End them, saying how this rank ends."""
        line, hub = self.line, self.hub
        self.line = self.hub = None
        if line is not None:
            line.close(how)
        if hub is not None:
            hub.close(how)

    def forget(self) -> None:
        """Let go of them in a forked child: its end is not this rank's, and a copy of a connection
        would hide that this rank has ended."""
        for each in (self.line, self.hub):
            if each is not None:
                each.forget()
        self.line = self.hub = self.group = None


_LINES = _Lines()


def open_lines() -> None:
    """Open this rank's line, unless it is open for the default process group already."""
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return
    if _LINES.group is not None and _LINES.group.refers_to(group):
        return
    _LINES.close("has left the process group")
    POSITION.verdict = None
    if not _LINES.num_opened:
        tell_at_the_end(_LINES.close, _explained_call)
        let_compilations_be_interrupted()
        os.register_at_fork(after_in_child=_LINES.forget)
    prefix = f"torchloom/lines/{_LINES.num_opened}"
    _LINES.num_opened += 1
    _LINES.group = GroupRef(group)
    end_waits_with_verdict(_LINES.group)  # for the program's own collectives
    store = dist.PrefixStore(prefix, own_store())
    if group.rank() == 0:
        _LINES.hub = _open_hub(store)
    _LINES.line = Line(group.rank(), lambda: _look_up(store), _LINES.limits)


def set_limits(limits: TimeoutsConfig) -> None:
    """Choose how long this rank waits for others."""
    _LINES.limits = limits
    if _LINES.line is not None:
        _LINES.line.limits = limits


def tell_step(step: int) -> None:
    """Send checksums of what has begun in groups whose messages carry no names; nothing waits for an answer.

    A backend such as NCCL matches collectives by their order alone, so rank 0 compares checksums over all that each
    rank has begun. Ranks that differ are told before the next step ends. One message of about 150 bytes a step and
    rank: 512 ranks at one step per second are 77 kB/s at rank 0 and, at about 30 us each, 1.5 % of one of its cores.

    Args:
        step: the optimizer step that has ended.
    """
    last = "nothing" if POSITION.last is None else POSITION.last.text()
    for name, each in CHANNELS.items():
        if _LINES.line is not None and not each.has_tags:
            each.num_told += 1
            of, words = f"{name}, {each.num_told}", f"came to {last}"
            _LINES.line.tell(kind="digest", of=of, state=each.rolling, words=words, step=step)


def tell_graph(graph: str, state: str, words: str) -> None:
    """Let ranks that compile one graph to different things learn of each other; nothing waits.

    Args:
        graph: which one, under which passes.
        state: what must be equal on all ranks that compile it.
        words: what it became here.
    """
    if _LINES.line is not None:  # at once: before the graph runs
        _LINES.line.tell(kind="graph", of=graph, state=state, words=words, at_once=True)


def wait_for(event: SyncPoint, works: list[dist.Work], *, on_stream: bool = False) -> None:
    """Wait until messages have come and gone.

    Args:
        event: what they are.
        works: what carries them.
        on_stream: let the device wait, where it can; with a time limit NCCL blocks this thread.

    Raises:
        AgreementError: the ranks run different programs.
        PeerLostError: a rank has ended or did not come in time.
    """
    if not works:
        return
    limit = timedelta(seconds=longest_s())
    POSITION.waiting = Wait(event, time.monotonic())
    try:
        # One that came since the messages began found nobody waiting, and ended no wait.
        if POSITION.verdict is not None:
            raise POSITION.verdict.error()
        for work in works:
            work.wait() if on_stream else work.wait(limit)
    except RuntimeError as error:
        raise explained(event, broken(event, error)) from None
    finally:
        POSITION.waiting = None
    works.clear()


def explained(event: SyncPoint, seen: Verdict) -> TorchloomError:
    """Return the error to raise where this rank cannot complete something with others.

    Args:
        event: what it was.
        seen: what is known here, for the case that nobody knows more.
    """
    before = POSITION.waiting
    POSITION.waiting = before or Wait(event, time.monotonic())
    try:
        line = _LINES.line
        verdict = POSITION.verdict
        if verdict is None and line is not None:
            verdict = line.verdict_within(_VERDICT_S)
    finally:
        POSITION.waiting = before
    return (verdict or seen).error()


def how_gone(rank: int) -> str:
    """Return how a rank has ended without a word, as far as this rank was told; empty if it has not."""
    return "" if _LINES.line is None else _LINES.line.gone.get(rank, "")


def broken(event: SyncPoint, error: RuntimeError) -> Verdict:
    """Return what is known here where gloo says that a connection has ended."""
    symptom = str(error).splitlines()[0].rpartition("] ")[2]
    return Verdict(
        "lost",
        f"this rank cannot complete {event.text()}: {symptom}. Look at the output of the other "
        "ranks",
    )


def _explained_call(call: str, error: RuntimeError) -> TorchloomError:
    """Return the error to show where one of the program's own collectives has lost a connection."""
    ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else ()
    what = label(call)
    event = NamedCollective(what, 0, POSITION.step, what.seed, "torch.distributed", ranks, actor=0)
    return explained(event, broken(event, error))


def longest_s() -> float:
    """Return the seconds after which a wait ends in any case, also where nobody judges."""
    limits = _LINES.limits
    return max(limits.step_s, limits.compile_s, limits.agree_s) + 60.0


def _open_hub(store: Any) -> Hub | None:
    host, token = _own_address(), secrets.token_hex(16)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        logger.warning("ranks cannot tell each other where they are: %s: %s", host, error)
        store.set("address", "")
        return None
    port = listener.getsockname()[1]
    store.set("address", f"{host} {port} {token}")
    return Hub(listener, token)


def _look_up(store: Any) -> tuple[str, int, str] | None:
    if not store.check(["address"]):
        return None
    text = store.get("address").decode()
    if not text:
        raise OSError("rank 0 does not listen")
    host, port, token = text.split()
    return host, int(port), token


def _own_address() -> str:
    """Return the address under which the other ranks reach this host; loopback on one host."""
    if envs.is_one_host():
        return "127.0.0.1"
    master = envs.get_str("MASTER_ADDR", "") or socket.gethostname()
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: sends nothing, chooses a route
                return str(probe.getsockname()[0])
    return "127.0.0.1"
