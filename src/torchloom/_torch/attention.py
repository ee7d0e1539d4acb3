"""The attention kernels of a GPU, called by name: torch chooses those of the device at hand, and traces on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


@contextmanager
def attention_of_gpus(place: str) -> Iterator[None]:
    """Let attention that is traced in a `with` block call what it would call on a CUDA device.

    A processor has no kernel for dropout, nor for values of another width than keys: it would compute the whole matrix
    of scores, in fp32.

    Args:
        place: "cpu" or "cuda", where the tensors that are traced say they are.
    """
    key = getattr(torch._C.DispatchKey, f"Autograd{place.upper()}")
    operator = aten.scaled_dot_product_attention.default
    # Of the Python dispatcher, which tracing alone uses: what a `Library` overrides stays broken when it has gone.
    operator.py_impl(key)(_attention)
    try:
        yield
    finally:
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()


def _attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose the kernel by dtype, shape and mask, as torch does where it can ask the device.

    The rules are those of `can_use_flash_attention` and `can_use_mem_efficient_attention` (pytorch/pytorch,
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    width, is_half = q.shape[-1], q.dtype in (torch.float16, torch.bfloat16)
    has_batch = q.dim() == k.dim() == v.dim() == 4
    has_each = has_batch and q.shape[1] == k.shape[1]
    if (
        (has_each or (has_batch and enable_gqa))
        and is_half
        and mask is None
        and v.shape[-1] == width <= 256
    ):
        flash = partial(
            aten._scaled_dot_product_flash_attention,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=width**-0.5 if scale is None else scale,
        )
        if width % 8 == 0:
            return flash(q, k, v)[0]
        return flash(*(F.pad(each, (0, -width % 8)) for each in (q, k, v)))[0][..., :width]
    aligned = 8 if is_half else 4
    if has_each and width % aligned == 0 and v.shape[-1] % aligned == 0:
        if mask is not None:
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            mask = mask.expand(*q.shape[:-1], k.shape[-2])
        trains = any(each.requires_grad for each in (q, k, v))
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, mask, trains, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
