"""Modes around a call that change what its operators do (2.11-2.15)."""

from __future__ import annotations

from torch import _C
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

num_function_modes = _C._len_torch_function_stack
"""Returns how many `TorchFunctionMode`s are active; `torch.set_default_device` is one."""
num_dispatch_modes = _C._len_torch_dispatch_stack
"""Returns how many `TorchDispatchMode`s are."""
transform_level = _C._functorch.maybe_current_level  # type: ignore[attr-defined]
"""Returns how many transforms of torch.func are around, None if none is: tensors are wrappers there."""
is_jit_tracing = _C._is_tracing  # type: ignore[attr-defined]
"""Returns whether `torch.jit.trace` records operators."""
forward = forward_ad
"""`forward._current_level` is -1 where nothing is differentiated forwards."""


def function_modes() -> list[str]:
    """Return the names of active modes, default devices aside."""
    modes = _get_current_function_mode_stack()
    return [type(each).__qualname__ for each in modes if not isinstance(each, DeviceContext)]


def dispatch_modes() -> list[str]:
    """Return the names of active modes."""
    return [type(each).__qualname__ for each in _get_current_dispatch_mode_stack()]
