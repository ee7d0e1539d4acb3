"""What text that Inductor generated asks torch for when it runs."""

from __future__ import annotations

from typing import Any

import torch

from torchloom import envs

DYNAMO_UTILS = "torch._dynamo.utils"
"""The module of which Dynamo's bytecode takes functions that ask a tensor for a size."""


def check_layout(tensor: torch.Tensor, sizes: Any, strides: Any, name: str | None) -> None:
    """Raise where a tensor has other sizes or strides than these, as generated text does.

    Args:
        tensor: what is checked.
        sizes: what its sizes have to be.
        strides: what its strides have to be.
        name: of what made it, for the error.

    Raises:
        AssertionError: it has; the text names both.
    """
    _guards().assert_size_stride(tensor, sizes, strides, name)


def tell_kernels() -> None:
    """Set the variable from which a kernel that is loaded learns how to find the memory of a tensor."""
    pointer = _guards()._torchinductor_pyobject_tensor_data_ptr
    envs.set_value("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", str(pointer))


def _guards() -> Any:
    return torch._C._dynamo.guards  # type: ignore[attr-defined]
