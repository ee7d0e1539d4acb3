"""Tensors without data, sizes without guards, and a fast comparison of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only


def tensors_inside(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value of dicts, lists, and what else torch takes for containers, in order."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def size_hint(size: Any) -> int:
    """Return a size as a number, without a guard: for a symbol what the trace saw."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def symbols_in(value: Any) -> frozenset[str]:
    """Return the names of the symbols in a size, or in the shape and strides of a tensor."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride()) if value.layout is torch.strided else value.shape
        return frozenset(name for size in sizes for name in symbols_in(size))
    if not isinstance(value, torch.SymInt):
        return frozenset()
    return frozenset(str(symbol) for symbol in value.node.expr.free_symbols)


def layout_hint(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    """Return sizes and strides as numbers, without a guard, and how many elements they reach over.

    Example:
        >>> layout_hint(torch.empty(1, 3).expand(2, 3))
        ([2, 3], [0, 1], 3)
    """
    sizes = [size_hint(size) for size in tensor.shape]
    strides = [size_hint(stride) for stride in tensor.stride()]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return sizes, strides, 0 if 0 in sizes else reach + 1


def fake_mode() -> Any:
    """Return a new mode whose tensors hold no data; real ones may be mixed in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def lives_on(value: torch.Tensor) -> bool:
    """Say whether an input of a captured graph is a parameter or buffer."""
    is_static = getattr(value, "_dynamo_static_input_type", None) is not None
    return is_static or isinstance(value, torch.nn.Parameter)


def num_holders(tensor: torch.Tensor) -> int:
    """Return how many tensors and storages hold a tensor's memory: it grows while somebody else has a view of it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def fake_like(
    tensor: torch.Tensor, *, requires_grad: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a new fake tensor of another's mode and layout, that views nothing.

    Args:
        tensor: a fake tensor.
        requires_grad: whether gradients of it are wanted.
        dtype: of the new one; None: that of the other.
    """
    mode: Any = tensor.fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        new = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device
        )
    return new.requires_grad_(requires_grad)


def same_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that says whether tensors look like these ones.

    It compares types, dispatch keys (signs of views among them), dtypes, devices, sizes, strides and whether
    gradients are required, and keeps no tensor.

    Example:
        >>> is_known = same_tensors([torch.ones(2)])
        >>> is_known(torch.zeros(2)), is_known(torch.ones(3)), is_known(None)
        (True, False, False)
    """
    made = torch._C._dynamo.guards.TensorGuards(  # type: ignore[attr-defined]
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    return made.check
