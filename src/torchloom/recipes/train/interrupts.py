"""What ends a run early: signals, full memory and lost ranks; the last two become one sentence.

    SIGINT SIGTERM   save and stop; a second one ends the process at once
    SIGHUP           save and continue; ignored if it was ignored before (nohup)

Full memory and lost ranks reach Python as errors of many types. They are recognised by type and text, and the
phase of a run by the files that the traceback went through.
"""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

import torch
import torch.distributed as dist

from torchloom.errors import EngineError, NoMemoryError, PeerLostError, causes, own_error

# Gloo raises RuntimeError for this; it has no type of its own.
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer")
# Torch's CPU allocator and C++ raise RuntimeError for this.
_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc")
_NO_DEVICE_MEMORY = ("CUDA out of memory", "CUDA error: out of memory")

_PHASES = (
    ("while planning", ("/torchloom/plan/", "/torchloom/step/planner.py")),
    (
        "while saving or loading a checkpoint",
        ("/torchloom/checkpoints/", "/distributed/checkpoint/"),
    ),
    (
        "while compiling",
        ("/torchloom/pipeline/", "/torch/_inductor/compile_fx.py", "/_dynamo/convert_frame.py"),
    ),
)
"""Phases, and parts of paths in their tracebacks; the first match counts."""


@final
class StopRequest:
    """Listen for SIGINT, SIGTERM and SIGHUP inside a `with` block; the loop asks at the end of each step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """The signal that asked this process to stop."""
        self._wants_save = False
        self._before: dict[int, object] = {}

    def take_save(self) -> bool:
        """Return whether this process was asked to save since the last call."""
        wants, self._wants_save = self._wants_save, False
        return wants

    def __enter__(self) -> StopRequest:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if sig != signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN:
                self._before[sig] = signal.signal(sig, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)  # pyrefly: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._wants_save = True
        elif self.signal_name is not None:
            os._exit(128 + number)
        else:
            self.signal_name = signal.Signals(number).name


@contextmanager
def failing_in(
    where: str | Callable[[], str], *, rank: int, request: StopRequest | None = None
) -> Iterator[None]:
    """Report in one sentence that memory ran out, that another rank ended, or that a signal broke off the step.

    Args:
        where: what this rank does in the `with` block, such as "in step 3"; a function where that
            is known only once it fails.
        rank: this rank, for the message.
        request: the signals that this rank listens for.

    Raises:
        NoMemoryError: host or device memory ran out.
        EngineError: another rank is gone, or a signal broke off what this one did.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        own = own_error(error)
        is_lost = isinstance(own, PeerLostError) or (own is None and is_lost_peer(error))
        doing = where if isinstance(where, str) else where()
        memory = None if own else full_memory(error)
        if memory is not None:
            words = _no_memory(memory, _phase_of(error) or doing, rank)
            raise NoMemoryError(words) from error
        if request and request.signal_name and (is_lost or own is None):
            raise EngineError(
                f"{request.signal_name} broke off {doing.removeprefix('in ')}, which is therefore "
                f"not saved ({type(error).__name__}): resume from the last checkpoint, if there is one"
            ) from error
        if is_lost and own is None:
            raise EngineError(f"another rank was lost {doing}: its own message says why") from error
        raise


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an error means that another rank ended."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _PEER_IS_GONE)


def full_memory(error: BaseException) -> str | None:
    """Return "host" or "device" where an error, or one that it wraps, means that this is full."""
    for each in causes(error):
        text = str(each)
        if isinstance(each, torch.OutOfMemoryError) or _has(text, _NO_DEVICE_MEMORY):
            return "device"
        if isinstance(each, MemoryError) or _has(text, _NO_HOST_MEMORY):
            return "host"
        if isinstance(each, OSError) and each.errno == errno.ENOMEM:
            return "host"
    return None


def _no_memory(memory: str, doing: str, rank: int) -> str:
    cures = "a smaller train_micro_batch_size_per_gpu (--micro-batch) or --seq-len"
    if memory == "device":
        cures += ", compile.memory_budget, offload_optimizer or offload_param"
    else:
        cures += ", fewer ranks on this host (--nproc), or no offloading to it"
    return (
        f"rank {rank} ran out of {memory} memory {doing}: use {cures}; resume "
        "from the last checkpoint, if there is one"
    )


def _phase_of(error: BaseException) -> str | None:
    files = [
        frame.filename.replace("\\", "/")
        for each in causes(error)
        for frame in traceback.extract_tb(each.__traceback__)
    ]
    for phase, places in _PHASES:
        if any(_has(file, places) for file in files):
            return phase
    return None


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)
