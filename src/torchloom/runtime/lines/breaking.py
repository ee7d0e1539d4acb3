"""Ending a wait inside gloo, which takes no call back.

A receive that times out puts every connection of its group into an error state (gloo's
UnboundBuffer::waitRecv), and whoever waits in one, on this rank or another, then raises.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch

from torchloom.errors import ShardError
from torchloom.position import POSITION
from torchloom.runtime.base import GroupRef
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
    if POSITION.waiting is None and not blocked_in():
        return  # the main thread meets the verdict when it next communicates
    with contextlib.suppress(RuntimeError):  # the time-out, or a connection that is broken already
        never = group.recv([torch.empty(1)], (ref.rank + 1) % ref.size, _NEVER_SENT)
        never.wait(timedelta(milliseconds=1))
