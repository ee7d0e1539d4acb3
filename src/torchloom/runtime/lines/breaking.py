"""Ending what a rank stands in when the run cannot go on: a wait inside gloo, or a compilation.

Gloo takes no call back. A receive that times out puts every connection of its group into an error state (gloo's
UnboundBuffer::waitRecv), and whoever waits in one, on this rank or another, then raises.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from datetime import timedelta

import torch

from torchloom.errors import ShardError
from torchloom.position import POSITION
from torchloom.runtime.base import GroupRef
from torchloom.runtime.channel import CHANNELS
from torchloom.runtime.lines.report import blocked_in

_NEVER_SENT = (1 << 29) + 7
"""A tag that no message has: those of collectives have bit 30."""


def end_waits_with_verdict(group: GroupRef) -> None:
    """Let a verdict end the waits of a gloo group's ranks in this process."""
    POSITION.on_verdict.append(lambda: _break(group))


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
