"""What a model must be before its parameters are cut: each refusal names parameters and a way out.

Sharding replaces the memory of every parameter. A parameter is therefore a dense tensor of its own:
of a dtype that communicates and trains, in memory that no other parameter or buffer reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from torchloom.errors import ShardError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What torch's optimizers and process groups compute in; 8 and 4 bit floats are neither."""
_WHOLES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)  # only as frozen parameters: integers have no gradient


_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


class _Named(NamedTuple):
    name: str
    tensor: Tensor


def check_model(model: nn.Module) -> None:
    """Refuse parameters that cannot be sharded to the same weights as in one process.

    Args:
        model: a model that is not sharded.

    Raises:
        ShardError: a parameter has no data yet, is no plain dense tensor, has a dtype that does not
            train, or shares memory with another parameter, with a buffer or with itself.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> model.bias = nn.Parameter(model.weight.data[0])
        >>> check_model(model)
        Traceback (most recent call last):
        torchloom.errors.ShardError: parameters 'weight' and 'bias' share memory ...
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_shape(name, tensor)
        _check_kind(name, tensor)
    for name, param in model.named_parameters():
        _check_dtype(name, param)
        _check_own_memory(name, param)
    for path, module in model.named_modules():
        _check_embedding(path, module)
        _check_attributes(path, module)
    _check_apart(model)


def _check_shape(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, _LAZY):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        raise ShardError(
            f"{kind} {name!r} has no shape yet: a lazy module makes it in the first forward pass; "
            "run the model once on a sample batch before it is sharded"
        )


def _check_kind(name: str, tensor: Tensor) -> None:
    is_param = isinstance(tensor, nn.Parameter)
    what = "parameter" if is_param else "buffer"
    is_plain = type(tensor) in (Tensor, nn.Parameter) or (
        is_param and type(tensor).__torch_function__ is nn.Parameter.__torch_function__
    )
    if type(tensor.data) is not Tensor or not is_plain:
        kind = type(tensor.data if is_plain else tensor).__name__
        raise ShardError(
            f"{what} {name!r} is a {kind}, not a plain tensor: it is already sharded or quantized "
            "by another library; hand over the original model"
        )
    if tensor.layout != torch.strided:
        raise ShardError(
            f"{what} {name!r} is sparse ({_short(tensor.layout)}); only dense tensors can be "
            "sharded and made equal on all ranks: keep it as .to_dense()"
        )
    if tensor.is_quantized:
        raise ShardError(
            f"{what} {name!r} is quantized ({_short(tensor.dtype)}): its scales would be lost; hand "
            "over the original model, or keep its integers and scales as plain buffers"
        )


def _check_dtype(name: str, param: nn.Parameter) -> None:
    if type(param) is not nn.Parameter and not param.is_floating_point():
        raise ShardError(
            f"parameter {name!r} is a {type(param).__name__} of {_short(param.dtype)}, which looks "
            "quantized: sharding cuts between elements and keeps no scales; hand over the original "
            "model, or keep the quantized weight as a plain buffer"
        )
    if param.dtype not in _FLOATS | _WHOLES:
        kind = "complex" if param.is_complex() else "a storage format"
        other = "torch.view_as_real of it" if param.is_complex() else "bfloat16 or float32"
        raise ShardError(
            f"parameter {name!r} is of dtype {_short(param.dtype)}, {kind} in which weights cannot "
            f"be kept and averaged: keep {other} as the parameter and convert in forward, or make "
            "it a buffer if it is not trained"
        )


def _check_own_memory(name: str, param: nn.Parameter) -> None:
    if param.requires_grad and not param.is_meta and _overlaps_itself(param):
        raise ShardError(
            f"parameter {name!r} of shape {tuple(param.shape)} is expanded: several of its "
            "elements are one place in memory, which no optimizer can step; make the small tensor "
            "the parameter and expand it in forward, or use .clone()"
        )


def _check_embedding(path: str, module: nn.Module) -> None:
    is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    if is_embedding and module.sparse and module.weight.requires_grad:
        raise ShardError(
            f"module {path!r} ({type(module).__name__}) makes sparse gradients, which cannot be "
            "averaged in parts: build it with sparse=False"
        )


def _check_attributes(path: str, module: nn.Module) -> None:
    """Refuse what was computed from parameters, as its graph leads to their memory of now."""
    anew = recomputed(module)
    for attr, value in module.__dict__.items():
        if isinstance(value, Tensor) and value.grad_fn is not None and attr not in anew:
            raise ShardError(
                f"attribute {attr!r} of module {path!r} was computed from parameters before they "
                "are sharded, and would stay as it is: compute it in forward, or assign .detach()"
            )


def recomputed(module: nn.Module) -> list[str]:
    """Return the attributes that torch's weight norm and pruning compute anew in each forward."""
    hooks = module._forward_pre_hooks.values()
    norms = [hook.name for hook in hooks if isinstance(hook, WeightNorm)]
    return norms + [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]


def _check_apart(model: nn.Module) -> None:
    """Refuse parameters whose memory another parameter or a buffer reads as well."""
    by_storage: dict[tuple[torch.device, int], list[_Named]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _has_memory(tensor.detach()):
            place = (tensor.device, tensor.untyped_storage().data_ptr())
            by_storage.setdefault(place, []).append(_Named(name, tensor))
    for group in by_storage.values():
        group.sort(key=lambda each: _span(each.tensor)[0])
        for index, left in enumerate(group):
            end = _span(left.tensor)[1]
            for right in group[index + 1 :]:
                if _span(right.tensor)[0] >= end:
                    break
                pair = sorted((left, right), key=lambda each: not _is_param(each.tensor))
                if _is_param(pair[0].tensor):
                    raise _shared(*pair)


def _is_param(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _shared(param: _Named, other: _Named) -> ShardError:
    if _is_param(other.tensor):
        return ShardError(
            f"parameters {param.name!r} and {other.name!r} share memory, or lie in turns in one place, without being one "
            "parameter, so that each would train on its own: assign the same nn.Parameter to both "
            "modules, or give one of them a .clone()"
        )
    return ShardError(
        f"buffer {other.name!r} shares memory with parameter {param.name!r}, which gets "
        "memory of its own when it is sharded: register buffer.clone(), or read the "
        "parameter instead of the buffer"
    )


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return bool(tensor.numel())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    start = int(tensor.storage_offset())
    last = sum(
        int(size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _overlaps_itself(tensor: Tensor) -> bool:
    """Say whether two elements of a tensor are one place in memory, or its strides do not rule it out."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _short(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")
