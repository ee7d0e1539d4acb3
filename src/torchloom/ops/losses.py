"""The operator that computes cross entropy behind a linear head a few rows at a time, and never holds all logits.

    chunked_loss    rows, weight, bias, labels -> loss, a factor, and gradients for a tangent of 1 over that factor

The gradients are made where the logits are, in forward; backward multiplies them by tangent and factor. They are those
of a sum over rows, whatever the reduction: in fp16 the gradients of a mean would vanish before a loss scale reaches them.
(Liger-Kernel, arXiv 2410.10989, section 3.2, computes a linear layer and its cross entropy this way.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from torchloom._torch.autograd import below_autograd
from torchloom._torch.tensors import size_hint
from torchloom.ops.library import LIBRARY, define

ROWS_ARG = 9
"""Where the arguments of `chunked_loss` say how many rows are computed at a time: it changes no result."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what sums and softmax are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fake(rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> list[Tensor]:
    wide, wanted = wide_dtype(rows.dtype), options[-1]
    return [
        rows.new_empty((), dtype=wide),
        rows.new_empty((), dtype=wide),
        rows.new_empty(rows.shape if wanted[0] else (0,)),
        rows.new_empty(weight.shape if wanted[1] else (0,), dtype=wide),
        rows.new_empty(weight.shape[:1] if wanted[2] else (0,), dtype=wide),
    ]


chunked_loss = define(
    "chunked_loss(Tensor rows, Tensor weight, Tensor? bias, Tensor labels, float scale, float cap, int ignore_index, "
    "float label_smoothing, bool is_mean, int rows_at_a_time, bool[] wanted) -> Tensor[]",
    _fake,
)
"""Return the cross entropy of `cap * tanh(scale * linear(rows, weight, bias))`, without tanh where `cap` is 0.

The results are loss, factor, and gradients of rows, weight and bias, which are empty unless `wanted`. Head gradients
are added up in fp32. `rows_at_a_time` bounds the logits that exist at a time."""


def loss_workspace_bytes(rows: Tensor, weight: Tensor, *options: Any) -> int:
    """Return what a call of `chunked_loss` allocates beside its results.

    That is logits of one chunk in fp32, and again their softmax, and a third time where there is a cap, whose tanh is
    needed twice. On a GPU a product in the dtype of the rows is there before it is added to the head's gradient.

    Args:
        rows: fake or real.
        weight: likewise.
        options: the other arguments.
    """
    cap, rows_at_a_time, wanted = options[3], options[7], options[8]
    vocabulary, width = map(size_hint, weight.shape)
    wide_bytes, own_bytes = wide_dtype(rows.dtype).itemsize, rows.dtype.itemsize
    logits = min(size_hint(rows.shape[0]), rows_at_a_time) * vocabulary
    softmax_bytes = logits * wide_bytes * (3 if cap else 2)
    if not rows.is_cuda or not wanted[1]:
        return softmax_bytes
    grad_bytes = logits * (own_bytes + wide_bytes * (2 if cap else 1))
    return max(softmax_bytes, grad_bytes + vocabulary * width * own_bytes)


_FP16_GAIN = 2.0**8
"""Keeps probabilities in large vocabularies above the smallest numbers of fp16; the factor takes it back."""


def _chunked_loss(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any
) -> list[Tensor]:
    """Compute what `chunked_loss` returns."""
    scale, cap, ignore_index, label_smoothing, is_mean, rows_at_a_time, wanted = options
    wide = wide_dtype(rows.dtype)
    gain = _FP16_GAIN if rows.dtype == torch.float16 else 1.0
    total = rows.new_zeros((), dtype=wide)
    gradients = (
        rows.new_empty(rows.shape if wanted[0] else (0,)),
        rows.new_zeros(weight.shape if wanted[1] else (0,), dtype=wide),
        rows.new_zeros(weight.shape[:1] if wanted[2] else (0,), dtype=wide),
    )
    is_counted = labels != ignore_index
    for begin in range(0, rows.shape[0], rows_at_a_time):
        part = slice(begin, begin + rows_at_a_time)
        log_probs, tanh = _log_probs(linear(rows[part], weight, bias).to(wide), scale, cap)
        counts = is_counted[part].unsqueeze(1)
        picked = torch.where(counts, labels[part].unsqueeze(1), 0)
        losses = (label_smoothing - 1.0) * log_probs.gather(1, picked)
        if label_smoothing:
            losses -= label_smoothing * log_probs.mean(1, keepdim=True)
        total += losses.masked_fill_(~counts, 0.0).sum()
        if any(wanted):
            grad = log_probs.exp_()  # of a sum: probabilities, less those that the labels ask for
            wished = torch.full_like(picked, label_smoothing - 1.0, dtype=wide)
            grad.scatter_add_(1, picked, wished)
            if label_smoothing:
                grad.sub_(label_smoothing / weight.shape[0])
            if tanh is not None:
                grad.mul_(tanh.square_().neg_().add_(1.0))
            if (by := scale * (cap or 1.0) * gain) != 1.0:
                grad.mul_(by)
            _add(gradients, wanted, grad, counts, rows[part], weight, part)
            del grad
        del log_probs, tanh  # before the next part is made
    count = is_counted.sum()
    if not is_mean:
        return [total, total.new_full((), 1.0 / gain), *gradients]
    # Without any label the mean is 0 / 0, as in torch, and its gradient 0.
    factor = torch.where(count > 0, 1.0 / (gain * count.to(wide)), 0.0)
    return [total / count, factor, *gradients]


def _log_probs(logits: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor | None]:
    """Return logarithms of probabilities, and the tanh of a cap; logits are overwritten."""
    if scale != 1.0:
        logits = logits.mul_(scale)
    if not cap:
        return log_softmax(logits, 1), None
    tanh = logits.tanh_()
    return log_softmax(tanh * cap, 1), tanh


def _add(
    gradients: tuple[Tensor, ...],
    wanted: list[bool],
    grad: Tensor,
    counts: Tensor,
    rows: Tensor,
    weight: Tensor,
    part: slice,
) -> None:
    """Add what the gradient of logits gives for rows, weight and bias; rows that do not count give nothing."""
    of_rows, of_weight, of_bias = gradients
    lower, counted = grad.to(rows.dtype), rows * counts  # a pass over rows, not over logits
    if wanted[0]:
        torch.mm(lower, weight, out=of_rows[part]).mul_(counts)
    if wanted[1] and grad.is_cuda:  # where a product in fp32 takes several times as long
        of_weight.add_(torch.mm(lower.t(), counted))
    elif wanted[1]:
        of_weight.addmm_(grad.t(), counted.to(grad.dtype))
    if wanted[2]:
        of_bias.add_(grad.t() @ counts.to(grad.dtype).squeeze(1))


class _ChunkedLoss(torch.autograd.Function):
    """The loss and its derivative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
        with below_autograd():
            wanted = list(ctx.needs_input_grad[:3])
            loss, *kept = chunked_loss(rows, weight, bias, *options, wanted)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.num_options = len(options)
        return (loss, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        factor, *gradients = ctx.saved_tensors
        by = grads[0] * factor
        # In a lower dtype, the number itself would be rounded to that dtype before it multiplies.
        scaled = [
            (each.to(by.dtype) * by).to(dtype) if needed else None
            for each, dtype, needed in zip(
                gradients, ctx.dtypes, ctx.needs_input_grad[:3], strict=True
            )
        ]
        return *scaled, *[None] * ctx.num_options


def _recorded(
    rows: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> list[Tensor] | tuple[Tensor, ...]:
    inputs = [each for each in (rows, weight, bias) if each is not None]
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        found: tuple[Tensor, ...] = _ChunkedLoss.apply(rows, weight, bias, *options[:-1])
        return list(found)
    with below_autograd():
        return chunked_loss(rows, weight, bias, *options)


LIBRARY.impl("chunked_loss", _chunked_loss, "CompositeExplicitAutograd")
LIBRARY.impl("chunked_loss", _recorded, "Autograd")
