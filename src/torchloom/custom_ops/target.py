"""An operator under test: how to call it, its Python kernel if it has one, and what its schema says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.modes import DispatchMode
from torchloom._torch.operators import has_autograd_kernel


@dataclass(frozen=True, kw_only=True)
class CheckedOperator:
    """An operator that is called and looked into."""

    name: str
    call: Callable[..., Any]
    kernel: Callable[[str], Callable[..., Any] | None]
    """Its Python function for a type of device, None where the dispatcher knows another kind."""
    mutates: frozenset[str]
    """Arguments that the schema says are written to."""
    arguments: tuple[str, ...]
    """Names of all arguments, in order."""
    signature: str
    """The arguments as Python writes them."""
    defaults: Mapping[str, Any]
    """What arguments are that are not passed, where they are no dtypes and the like."""
    returns_inputs: bool
    """Whether the schema says that results are, or view, arguments."""
    has_backward: bool

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, set[int]]:
        """Run the operator without autograd; return its result and the storages that it writes.

        What a Python kernel writes is seen even where the values stay the same.
        """
        tensors = tensors_in([*args, *kwargs.values()])
        device = tensors[0].device.type if tensors else "cpu"
        kernel = self.kernel(device)
        with torch.no_grad():
            if kernel is None:
                return self.call(*args, **kwargs), set()
            with WriteLog() as log:
                return kernel(*args, **kwargs), log.storages

    def named(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


class WriteLog(DispatchMode):
    """Notes the storages that operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            self.storages |= {storage_of(each) for each in tensors_in([value])}
        return func(*args, **kwargs)


def target_of(op: Any) -> CheckedOperator:
    """Look an operator up.

    Args:
        op: what `custom_op` (ours or torch's) returned, or an operator of `torch.ops`.

    Raises:
        TypeError: it is none of these.
    """
    defined = getattr(op, "defined", op)
    overload = getattr(defined, "_opoverload", defined)
    if hasattr(overload, "default") and not hasattr(overload, "_schema"):
        overload = overload.default
    schema = getattr(overload, "_schema", None)
    if schema is None:
        raise TypeError(
            f"{op!r} is no operator: pass what @custom_op returned, or one of torch.ops"
        )
    kernels = getattr(defined, "_backend_fns", {})
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    return CheckedOperator(
        name=schema.name,
        call=overload,
        kernel=lambda device: kernels.get(device, kernels.get(None)),
        mutates=frozenset(written),
        arguments=tuple(argument.name for argument in schema.arguments),
        signature=_signature(schema),
        defaults=_defaults(schema),
        returns_inputs=any(each.alias_info is not None for each in schema.returns),
        has_backward=_has_backward(defined, overload),
    )


def _signature(schema: Any) -> str:
    defaults, parts = _defaults(schema), []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        name = argument.name
        default = f"={defaults.get(name)!r}" if argument.has_default_value() else ""
        parts.append(name + default)
    return ", ".join(parts)


def _defaults(schema: Any) -> dict[str, Any]:
    return {
        each.name: each.default_value
        for each in schema.arguments
        if each.has_default_value() and str(each.type) == str(each.real_type)  # a dtype is an int
    }


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for each in values for tensor in tensors_in(each)]
    return []


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that mean something: those along which there are two elements."""
    if not tensor.numel():
        return ()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def storage_of(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor."""
    return tensor.untyped_storage()._cdata


def _has_backward(defined: Any, overload: Any) -> bool:
    if hasattr(defined, "_backward_fn"):
        return defined._backward_fn is not None
    return has_autograd_kernel(overload)
