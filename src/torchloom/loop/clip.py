"""Clip gradients of sharded models in a loop of one's own, by our function and by torch's.

A gradient of a shard has a shard's norm. `torch.nn.utils.clip_grad_norm_` would take it for the norm of the
whole, so each rank would scale by a factor of its own. Frameworks and trainers call that function, and
nothing in it asks a tensor; so once a model is sharded, its norm is the one over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchloom._torch.autograd import TotalNorm, replace_total_norm
from torchloom._torch.untraced import leave_alone
from torchloom.errors import NonFiniteError, ShardError
from torchloom.loop.norms import Gradients, find_non_finite
from torchloom.runtime import lookup
from torchloom.shard import Layout, layout_of, owners_of, sharded_models
from torchloom.shard.shards import clear_padding_

_LAST_NORMS: dict[str, Tensor] = {}
"""The last norm that was computed over gradients of a model, by its communicator; steps take it away."""

_ByHandle = dict[str, Gradients]


def take_norm(handle: str) -> Tensor | None:
    """Return the norm that was computed since the last call, None if none was."""
    return _LAST_NORMS.pop(handle, None)


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of sharded models by their global norm, with one collective.

    Args:
        model: a sharded model after backward, or several whose gradients have one norm together; all
            ranks must call.
        max_norm: the largest norm.
        norm_type: the order of the norm: any positive number, or inf for the largest absolute value.
        error_if_nonfinite: raise on all ranks, before any gradient changes, when one is NaN or Inf
            on any rank; reads the norm on the host. Otherwise clipping scales all gradients by such
            a norm, as torch's function of this name does: NaN makes them NaN, Inf makes finite ones 0.

    Returns:
        The norm before clipping, equal on every rank.

    Raises:
        ShardError: a model is not sharded, none was given, or the order is not positive.
        NonFiniteError: a gradient is not finite; names the rank and the first parameter.

    Example:
        >>> torchloom.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)  # doctest: +SKIP
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ShardError("clip_grad_norm_ was given no model: pass those that shard_model sharded")
    by_handle: _ByHandle = {}
    for each in models:
        layout = layout_of(each)
        _of(by_handle, layout)  # also without a gradient: the other ranks may have some
        for name, param in owners_of(each).items():
            if param.grad is not None:
                _add(by_handle, param.grad, layout, name)
    norm = _norm(by_handle, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        _raise_first_non_finite(models)
        norm = _norm(by_handle, norm_type, torch.float64)
    for gradients in by_handle.values():
        gradients.clip_(norm, max_norm)
    return norm


leave_alone(clip_grad_norm_, "it communicates")


@functools.cache
def follow_torch_norms() -> None:
    """Let `torch.nn.utils.clip_grad_norm_` and `get_total_norm` count the shards of other ranks."""
    replace_total_norm(_norm_over_ranks)


def _norm_over_ranks(original: TotalNorm) -> TotalNorm:
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        by_handle, others = _sorted(given)
        if not any(found.divided for found in by_handle.values()):
            whole = original(given, norm_type, error_if_nonfinite, foreach)
            if float(norm_type) == 2.0 and not others:
                _LAST_NORMS.update(dict.fromkeys(by_handle, whole))
            return whole
        norm = _norm(by_handle, norm_type)
        if others:
            rest = original(others, norm_type, False, foreach).to(norm.device)
            norm = torch.linalg.vector_norm(torch.stack([norm, rest]), norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                "the norm of the gradients over all ranks is not finite, so no gradient was changed: drop "
                "them (optimizer.zero_grad()) to leave this step out; "
                "torchloom.clip_grad_norm_(model, max_norm, error_if_nonfinite=True) names the parameter"
            )
        return norm

    return total_norm


def _sorted(given: Sequence[Tensor]) -> tuple[_ByHandle, list[Tensor]]:
    """Sort tensors by the communicator of the parameter whose gradient they are; return others beside."""
    missing = {id(tensor): tensor for tensor in given}
    by_handle: _ByHandle = {}
    for model in sharded_models():
        layout, params = layout_of(model), dict(model.named_parameters())
        for spec in layout:
            param = params.get(spec.name)  # other models may have changed since
            grad = None if param is None else param.grad
            if grad is not None and missing.pop(id(grad), None) is not None:
                _add(by_handle, grad, layout, spec.name)
    return by_handle, list(missing.values())


def _of(by_handle: _ByHandle, layout: Layout) -> Gradients:
    empty = Gradients(lookup(layout.handle), layout.norm_dtype)
    return by_handle.setdefault(layout.handle, empty)


def _add(by_handle: _ByHandle, grad: Tensor, layout: Layout, name: str) -> None:
    spec, found = layout[name], _of(by_handle, layout)
    if spec.mode == "sharded":
        clear_padding_(grad, spec.numel, layout.rank)
    (found.divided if spec.mode == "sharded" else found.whole).append(grad)


def _norm(by_handle: _ByHandle, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
    order = float(norm_type)
    if not order > 0:
        raise ShardError(
            f"a norm of type {norm_type} over gradients of sharded parameters is not supported: clip by a positive "
            "one, such as norm_type=2.0 or float('inf')"
        )
    norms = [found.norm(order, dtype) for found in by_handle.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    if order == 2.0:
        _LAST_NORMS.update(dict.fromkeys(by_handle, norm))
    return norm


def _raise_first_non_finite(models: Sequence[nn.Module]) -> None:
    for model in models:
        layout, params = layout_of(model), owners_of(model)
        names = [spec.name for spec in layout if spec.requires_grad]
        grads = [params[name].grad for name in names]
        found = find_non_finite(names, grads, (), lookup(layout.handle))
        if found is not None:
            raise NonFiniteError(
                f"{found}. No gradient was changed: drop them (optimizer.zero_grad()) to leave this "
                "step out, or pass error_if_nonfinite=False"
            )
