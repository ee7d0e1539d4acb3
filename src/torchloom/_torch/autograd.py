"""Autograd's state: the hooks of saved tensors, and whether backward keeps its graph."""

from __future__ import annotations

from typing import Any

import torch


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the two hooks that autograd asks now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def pop_saved_tensors_hooks() -> None:
    """Take the hooks that autograd asks now off its stack."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensors_hooks(hooks: tuple[Any, Any]) -> None:
    """Let autograd ask these hooks first."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def keeps_graph() -> bool:
    """Say whether the backward pass that runs here keeps its graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
