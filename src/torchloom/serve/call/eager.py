"""The switch that makes programs and decorated models run the model as it is, at any time.

`eager()` sets it for calls of this thread or task, torch's stance `force_eager` for those of the process, and
`TORCHLOOM_ENFORCE_EAGER=1` for what is built or loaded while it is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torchloom import envs
from torchloom._torch.modes import is_eager_forced

ENFORCE_EAGER = "TORCHLOOM_ENFORCE_EAGER"
_IS_ASKED: ContextVar[bool] = ContextVar("torchloom_serve_eager", default=False)
_is_asked = _IS_ASKED.get


@contextmanager
def eager() -> Iterator[None]:
    """Let programs and decorated models run the model as it is within a block; nothing is compiled for it.

    It holds for this thread and, in asynchronous code, for this task; others go on as they were. What is compiled stays
    and runs again behind the block. A program that is built within stays the model as it is. Also a decorator of functions.

    Example:
        >>> import torch, torchloom
        >>> from torchloom.serve import Contract, Dim, build
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> program = build(model, Contract({"input": (Dim("batch", 1, 8), 4)}), backend="eager")
        >>> with torchloom.serve.eager(), torch.no_grad():
        ...     program(torch.ones(9, 4)).shape
        torch.Size([9, 2])
    """
    token = _IS_ASKED.set(True)
    try:
        yield
    finally:
        _IS_ASKED.reset(token)


def is_eager() -> bool:
    """Return whether calls run the model as it is: asked by each call, for 0.2 us."""
    return _is_asked() or is_eager_forced()


def why_eager() -> str:
    """Return why calls run the model as it is; empty if they do not."""
    if _is_asked():
        return "torchloom.serve.eager()"
    return 'torch.compiler.set_stance("force_eager")' if is_eager_forced() else ""


def why_enforced() -> str:
    """Return the variable of the environment that turns compiling off; empty if none does."""
    return f"{ENFORCE_EAGER}=1" if envs.is_on(ENFORCE_EAGER) else ""
