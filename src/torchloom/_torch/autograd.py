"""Reads and replaces parts of autograd: hooks of saved tensors, what runs backward, the norm that clipping takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

RunBackward = Callable[..., Any]
"""(outputs, grad_outputs, retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad) -> gradients."""


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the two hooks that autograd asks now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def pop_saved_tensors_hooks() -> None:
    """Take the hooks that autograd asks now off its stack."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensors_hooks(hooks: tuple[Any, Any]) -> None:
    """Let autograd ask these hooks first."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def are_saved_tensors_hooks_off() -> bool:
    """Say whether a transform of `torch.func` has switched the hooks of saved tensors off."""
    state: Any = torch._C._autograd
    return not state._saved_tensors_hooks_is_enabled()


@functools.cache
def let_transforms_begin(is_ours: Callable[[Any], bool]) -> None:
    """Let `torch.func.grad`, `vjp`, `jacrev` and `hessian` begin inside of hooks of ours, which rest meanwhile.

    torch refuses to begin them inside of any; `disable_saved_tensors_hooks`, which they enter, calls what is replaced.

    Args:
        is_ours: says whether hooks may rest.
    """
    state: Any = torch._C._autograd
    disable = state._saved_tensors_hooks_disable

    @functools.wraps(disable)
    def rest(message: str, fail_if_non_empty: bool = True) -> None:
        may_rest = are_saved_tensors_hooks_off() or is_ours(top_saved_tensors_hooks())
        disable(message, fail_if_non_empty and not may_rest)

    state._saved_tensors_hooks_disable = rest


def keeps_graph() -> bool:
    """Say whether the backward pass that runs here keeps its graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def replace_backward(make: Callable[[RunBackward], RunBackward]) -> None:
    """Put a function in the place of what `torch.autograd.backward` and `torch.autograd.grad` call to run.

    Both, and `Tensor.backward`, stay the objects that they are, whoever imported them before.

    Args:
        make: takes torch's function and returns the one to use.
    """
    module: Any = torch.autograd
    module._engine_run_backward = make(module._engine_run_backward)


def below_autograd() -> AbstractContextManager[Any]:
    """Return a block in which operators run as they do behind autograd: nothing is recorded for backward."""
    guard: Any = torch._C._AutoDispatchBelowAutograd()
    return guard


TotalNorm = Callable[..., Tensor]
"""(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None) -> norm."""


def replace_total_norm(make: Callable[[TotalNorm], TotalNorm]) -> None:
    """Put a function in the place of the norm in `torch.nn.utils.clip_grad_norm_` and `get_total_norm`.

    torch's function stays the object that it is, whoever imported it before: what it calls is replaced, under its
    `no_grad`.

    Args:
        make: takes torch's function and returns the one to use. Dynamo does not look into it.
    """
    outer: Any = clip_grad._get_total_norm
    cell = dict(zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True))["func"]
    cell.cell_contents = torch.compiler.disable(make(cell.cell_contents))
