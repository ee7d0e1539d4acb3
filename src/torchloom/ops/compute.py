"""Matrix products by a named implementation, and the facts of a product that choose one.

    mm(a, b)              ->  torchloom::matmul(a, b, None, kernel)
    addmm(bias, a, b)     ->  torchloom::matmul(a, b, bias, kernel)

`kernel` names an implementation that the body knows; a name that a machine lacks runs torch's own
product there, so a graph that was compiled elsewhere stays right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.tensors import size_hint
from torchloom.graph.nodes import args_of, value_of
from torchloom.ops.library import define

aten = torch.ops.aten

KERNELS: tuple[str, ...] = ("onednn",)
"""Names of implementations besides torch's own, which is `DEFAULT_KERNEL`."""
DEFAULT_KERNEL = "blas"


def _fake_matmul(a: Tensor, b: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


matmul = define("matmul(Tensor a, Tensor b, Tensor? bias, str kernel) -> Tensor", _fake_matmul)
"""Multiply (m, k) by (k, n), add a bias of (n,) if there is one; the result is contiguous."""


class Product(NamedTuple):
    """What the speed of a matrix product depends on, apart from the machine.

    Example:
        >>> Product(1024, 512, 1408, "n", "t", False).key
        'matmul f32 1024x512x1408 nt'
    """

    m: int
    k: int
    n: int
    a_layout: str
    """"n": rows are contiguous, "t": columns are."""
    b_layout: str
    has_bias: bool

    @property
    def key(self) -> str:
        """Text that is equal for products that cost the same."""
        bias = " bias" if self.has_bias else ""
        return f"matmul f32 {self.m}x{self.k}x{self.n} {self.a_layout}{self.b_layout}{bias}"

    def entry(self, kernel: str) -> str:
        """Return the name under which the time on one implementation is kept."""
        return f"{self.key} {kernel}"


def operands_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Return (a, b, bias or None) of a plain product, None for any other node."""
    if node.kwargs:
        return None  # a scaled addmm, or one into another dtype
    if node.target is aten.mm.default:
        a, b = args_of(node)
        return a, b, None
    if node.target is aten.addmm.default:
        bias, a, b = args_of(node)
        return a, b, bias
    return None


def product_of(node: fx.Node) -> Product | None:
    """Return the facts of a product that may have a choice, else None."""
    operands = operands_of(node)
    if operands is None:
        return None
    a, b, bias = (None if each is None else value_of(each) for each in operands)
    return product_from(a, b, bias)


def entry_of(node: fx.Node) -> str | None:
    """Return the name under which a node's time as a product on its implementation is kept."""
    kernel = DEFAULT_KERNEL
    if node.target is matmul:
        *operands, kernel = args_of(node)
        product = product_from(*(None if each is None else value_of(each) for each in operands))
    else:
        product = product_of(node)
    return None if product is None else product.entry(kernel)


def product_from(a: Any, b: Any, bias: Any) -> Product | None:
    """Return the facts of a product of these tensors, None where torch's own is all there is.

    Only fp32 on a CPU has a choice: what is narrower runs on oneDNN in torch as well.
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    if any(each.dtype is not torch.float32 or each.device.type != "cpu" for each in (a, b)):
        return None
    if bias is not None and (bias.dim() != 1 or bias.dtype is not torch.float32):
        return None
    a_layout, b_layout = _layout(a), _layout(b)
    if a_layout is None or b_layout is None:
        return None
    m, k, n = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[1])
    if bias is not None and size_hint(bias.shape[0]) != n:
        return None  # a bias of one element is broadcast
    return Product(m, k, n, a_layout, b_layout, bias is not None)


def _layout(tensor: Tensor) -> str | None:
    rows, columns = (size_hint(stride) for stride in tensor.stride())
    if columns == 1 and rows >= size_hint(tensor.shape[1]):
        return "n"
    if rows == 1 and columns >= size_hint(tensor.shape[0]):
        return "t"
    return None
