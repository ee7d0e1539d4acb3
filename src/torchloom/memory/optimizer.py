"""What an optimizer's step allocates: its own code, run on tensors without data.

Fused kernels need next to nothing; `foreach` and plain loops make temporary tensors of the size of
parameters, and some optimizers several.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom import _torch
from torchloom.memory.ledger import Ledger
from torchloom.memory.workspace import WorkspaceTable


def optimizer_peak(optimizer: Optimizer, workspaces: WorkspaceTable | None = None) -> int | None:
    """Return the most bytes that a step allocates above parameters, gradients and states.

    Args:
        optimizer: any of torch's protocol; neither it nor its parameters change. Step hooks are
            left out.
        workspaces: what operators allocate for themselves; unknown ones are probed.

    Returns:
        Bytes; None where the step reads values of tensors, which these do not have.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1000))
        >>> 4000 <= optimizer_peak(torch.optim.Adam([weight], fused=False, foreach=False)) < 9000
        True
    """
    workspaces = workspaces or WorkspaceTable()
    for _ in range(2):  # the second time with the workspaces of operators met in the first
        ledger = Ledger(workspaces)
        try:
            _step_twice(optimizer, ledger)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            return None
        if not workspaces.probe_calls(ledger.calls):
            break
    return ledger.peak_bytes


def _step_twice(optimizer: Optimizer, ledger: Ledger) -> None:
    """Step a twin of the optimizer: the first step makes its states, the second is counted."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    numbers = {  # steps taken, say: read here, as tensors without data cannot be
        (param, name): value.item()
        for param, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    with _torch.fake_mode():
        twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        for group, like in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for param in group["params"]:
                made = nn.Parameter(_like(param))
                made.grad = _like(param)
                like["params"].append(made)
                for name, value in optimizer.state.get(param, {}).items():
                    if (param, name) in numbers:
                        value = torch.tensor(numbers[param, name], dtype=value.dtype)
                    elif isinstance(value, Tensor):
                        value = _like(value)
                    twin.state[made][name] = value
        twin.step()
        params = [param for group in twin.param_groups for param in group["params"]]
        states = [value for state in twin.state.values() for value in state.values()]
        ledger.ignore([*params, *(param.grad for param in params), *states])
        with ledger:
            twin.step()


def _like(tensor: Tensor) -> Tensor:
    sizes, strides, _ = _torch.layout_hint(tensor)
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
