"""Full memory and lost ranks, reported in one sentence: which rank, in which phase, and what to do.

Both reach Python as errors of many types. They are recognised by type and text, and the phase by the
files that the traceback went through.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchloom.errors import EngineError, NoMemoryError, own_error

# Gloo raises RuntimeError for this; it has no type of its own.
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer")
# Torch's CPU allocator and C++ raise RuntimeError for this.
_NO_HOST_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc")
_NO_DEVICE_MEMORY = ("CUDA out of memory", "CUDA error: out of memory")

_PHASES = (
    ("while planning", ("/torchloom/plan/", "/torchloom/step/planner.py")),
    (
        "while saving or loading a checkpoint",
        ("/torchloom/engine/checkpoint", "/distributed/checkpoint/"),
    ),
    (
        "while compiling",
        ("/torchloom/pipeline/", "/torch/_inductor/compile_fx.py", "/_dynamo/convert_frame.py"),
    ),
)
"""Phases, and parts of paths in their tracebacks; the first match counts."""


@contextmanager
def failing_in(where: str | Callable[[], str], *, rank: int) -> Iterator[None]:
    """Report in one sentence that memory ran out, or that another rank ended.

    Args:
        where: what this rank does in the `with` block, such as "in step 3"; a function where that
            is known only once it fails.
        rank: this rank, for the message.

    Raises:
        NoMemoryError: host or device memory ran out.
        EngineError: another rank is gone.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if own_error(error) is not None:
            raise
        doing = where if isinstance(where, str) else where()
        memory = full_memory(error)
        if memory is not None:
            words = _no_memory(memory, _phase_of(error) or doing, rank)
            raise NoMemoryError(words) from error
        if is_lost_peer(error):
            raise EngineError(f"another rank was lost {doing}: its own message says why") from error
        raise


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an error means that another rank ended."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _PEER_IS_GONE)


def full_memory(error: BaseException) -> str | None:
    """Return "host" or "device" where an error, or one that it wraps, means that this is full."""
    for each in _chain(error):
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
        for each in _chain(error)
        for frame in traceback.extract_tb(each.__traceback__)
    ]
    for phase, places in _PHASES:
        if any(_has(file, places) for file in files):
            return phase
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps, as `errors.own_error` goes through them."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = getattr(each, "inner_exception", None) or each.__cause__ or each.__context__


def _has(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)
