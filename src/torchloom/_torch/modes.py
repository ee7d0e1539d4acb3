"""Modes around a call that change what its operators do, and what tensors share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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


def is_eager_forced() -> bool:
    """Return whether `torch.compiler.set_stance("force_eager")` holds; Dynamo is not imported to know."""
    found = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return found is not None and found.stance == "force_eager"


def function_modes() -> list[str]:
    """Return the names of active modes, default devices aside."""
    modes = _get_current_function_mode_stack()
    return [
        type(each).__qualname__ for each in modes if not isinstance(each, _device.DeviceContext)
    ]


def dispatch_modes() -> list[str]:
    """Return the names of active modes."""
    return [type(each).__qualname__ for each in _get_current_dispatch_mode_stack()]


def storage_id(value: Any) -> int | None:
    """Return what tensors over one storage have in common; None for what has no storage."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return _innermost(value).untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors
        return None


def num_storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and other objects refer to the memory of a tensor."""
    return _C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def num_writes(value: Any) -> int:
    """Return how often a tensor has been written since an operator made it, as far as that is counted."""
    if not isinstance(value, torch.Tensor):
        return 0
    tensors = (value, _innermost(value))
    return max(0 if each.is_inference() else each._version for each in tensors)


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the wrappers that transforms of torch.func put around it."""
    functorch: Any = _C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_traced(values: Iterable[Any]) -> bool:
    """Return whether a compiler's stand-ins for tensors are among some values."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(isinstance(each, (FakeTensor, FunctionalTensor)) for each in values)


def is_profiling() -> bool:
    """Return whether a profiler of torch's runs."""
    return torch.autograd._profiler_enabled()


DispatchMode = TorchDispatchMode
"""Base of modes that see each operator below autograd."""


def without_modes() -> AbstractContextManager[Any]:
    """Return a block in which operators really run, also inside of a compiler."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def modes_kept() -> Iterator[None]:
    """Leave behind a block what it entered and did not leave, such as a graph that fails within a transform."""
    functorch: Any = _C._functorch
    depth, level = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    why_no_hooks = _C._autograd._saved_tensors_hooks_get_disabled_error_message()
    settings = [(write, read()) for read, write in _SETTINGS]
    with _C._PreserveDispatchKeyGuard():  # autocast is among these keys
        try:
            yield
        finally:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            while forward_ad._current_level > level:
                forward_ad.exit_dual_level()
            if why_no_hooks is None:
                _C._autograd._saved_tensors_hooks_enable()
            for write, value in settings:
                write(value)


_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (torch.is_grad_enabled, _C._set_grad_enabled),
    (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    (
        _C._functorch.get_inplace_requires_grad_allowed,
        _C._functorch.set_inplace_requires_grad_allowed,
    ),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (partial(torch.get_autocast_dtype, each), partial(torch.set_autocast_dtype, each))
        for each in ("cpu", "cuda")
    ),
)


def default_device() -> torch.device | None:
    """Return what `torch.set_default_device` was told."""
    return _device.CURRENT_DEVICE


def wants_values(error: BaseException) -> bool:
    """Return whether code failed because it read the values of tensors without data."""
    from torch._subclasses import fake_tensor

    kinds = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    return isinstance(error, kinds)
