"""Tensor subclasses that other parts of torch ask for their place in a whole tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function

from torchloom._torch.untraced import leave_alone

_T = TypeVar("_T", bound=torch.Tensor)

PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass: operators return plain tensors."""


def as_plain_tensors() -> AbstractContextManager[None]:
    """Let operators take tensors of subclasses for plain ones inside a `with` block, and return plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def is_for_machinery(func: Any, frame: FrameType | None) -> bool:
    """Return whether `__torch_function__` was called for what works on tensors as they are stored.

    That is torchloom, torch's private modules (Dynamo, fake tensors, DCP), compiled graphs, and all that an optimizer's
    step calls.

    Args:
        func: what was called.
        frame: that called `__torch_function__`.
    """
    if isinstance(func, torch._ops.OpOverload):
        return True
    while frame is not None and frame.f_globals.get("__name__") in _ON_BEHALF:
        frame = frame.f_back
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    if module.startswith(_MACHINERY) and module not in _ASKS_FOR_WHOLES:
        return True
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False


_ON_BEHALF = frozenset(
    each.__module__ for each in (handle_torch_function, torch.Tensor.norm, torch.norm)
)
"""Modules in which torch looks for `__torch_function__` on behalf of whoever called."""
_MACHINERY = (
    "torchloom.",
    f"{torch.__name__}._",
    "torch.distributed.checkpoint.",
    "torch.distributed.fsdp.",  # ShardedGradScaler
    "torch.amp.",
    "torch.optim.",
    "torch.testing.",
)
_ASKS_FOR_WHOLES = ("torch.optim.swa_utils", "torch.optim._muon")
"""Modules among these that work on whole weights outside of steps: averages, and Muon's constructor, which looks at shapes."""
_STEP = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__
"""Code of the function that torch puts around each optimizer's `step`."""


def is_inside_step() -> bool:
    """Say whether the step of an optimizer that calls this was called by the step of another one, which wraps it."""
    frame, num_steps = sys._getframe(1), 0
    while frame is not None:
        num_steps += frame.f_code is _STEP
        frame = frame.f_back
    return num_steps > 1


leave_alone(is_inside_step, "it looks at the stack")


def wrapper(kind: type[_T], like: torch.Tensor, shape: Sequence[int]) -> _T:
    """Return a tensor of a subclass that has no memory: a shape, and dtype and device of another one."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
        kind, torch.Size(shape), dtype=like.dtype, device=like.device
    )


def writer_of_this_save() -> str | None:
    """Return the class name of the storage writer of the `torch.distributed.checkpoint.save` that calls.

    A tensor is not told who writes it; the writer is a local variable of the function that makes the plan.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            writer = frame.f_locals.get("storage_writer")
            if writer is not None:
                return type(writer).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
