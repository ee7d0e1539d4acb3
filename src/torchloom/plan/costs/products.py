"""The matrix products that a captured graph will compute, forward and backward.

The graph runs once on tensors without data while its products are noted. This takes no memory and
no arithmetic, and adds no guards: sizes that are unknown count as what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.modes import DispatchMode
from torchloom._torch.tensors import fake_mode, layout_hint, size_hint
from torchloom.graph import tensors_in
from torchloom.ops.compute import Product, product_from

aten = torch.ops.aten
# What a graph reads out of a tensor has no value here. Floats are rates and scales, not sizes.
_SCALARS = {torch.float32: 0.5, torch.float64: 0.5, torch.bool: True}


def find_products(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Product]:
    """Return the products of a graph that have a choice, each once, in order of execution.

    Args:
        gm: a graph as Dynamo hands it to a backend.
        example_inputs: its inputs, with data or without.
    """
    seen = _Products()
    with fake_mode(), torch.random.fork_rng(devices=[]), seen:
        inputs = [_blank(value) for value in example_inputs]
        results = gm(*inputs)
        if torch.is_grad_enabled():
            _backward(results, [*inputs, *gm.parameters()])
    return list(seen.found)


class _Products(DispatchMode):
    """Notes the products that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Product, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return _SCALARS.get(args[0].dtype, 1)
        product = None
        if not kwargs and func is aten.mm.default:
            product = product_from(args[0], args[1], None)
        elif not kwargs and func is aten.addmm.default:
            product = product_from(args[1], args[2], args[0])
        if product is not None:
            self.found[product] = None
        return func(*args, **(kwargs or {}))


def _backward(results: Any, inputs: Sequence[Any]) -> None:
    roots = [each for each in tensors_in(results) if each.requires_grad]
    leaves = [each for each in tensors_in(inputs) if each.requires_grad]
    if roots and leaves:
        grads = [torch.empty_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, grads, allow_unused=True)


def _blank(value: Any) -> Any:
    """Return a tensor like `value` of the mode that is entered; sizes become numbers."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    shape, strides, _ = layout_hint(value)
    blank = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return blank.requires_grad_(value.requires_grad)
