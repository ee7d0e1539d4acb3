"""Parameters that are frozen or unfrozen after a compile, for a torch without guards on that.

There a compiled `nn.Module` goes on without gradients for what is unfrozen (pytorch/pytorch#139476).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchloom._torch.facts import guards_requires_grad


def compiling_again(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a compiled model, with all of Dynamo's entries dropped where `requires_grad` has changed.

    Where torch guards `requires_grad` that is `call` itself.
    """
    if guards_requires_grad():
        return call
    params, compiled_for = list(model.parameters()), list[bool]()

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled_for
        now = [param.requires_grad for param in params]
        if compiled_for and now != compiled_for:
            torch._dynamo.reset()  # parts behind graph breaks have entries of their own
        compiled_for = now
        return call(*args, **kwargs)

    return run
