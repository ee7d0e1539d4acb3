"""Parameters that hold a shard answer as the whole weight does, and refuse what would take the shard for it.

    p.shape, p.dim(), p.size(0), p.numel()          of the whole weight, as those of a DTensor
    ema.lerp_(p.detach(), 0.01), p.mul_(0.9)        the same for each element: right on each rank's part
    p.norm(), p[0], average.copy_(p)                see one rank's part, or a whole weight beside it: refused
    p.grad                                          answers as its parameter does

The parameter stays the same object; its class becomes `ShardParameter`. What elementwise operators make of it without
autograd is a `Shard` of the same weight. Inside of an optimizer's step a shard is what the step updates, a flat tensor like
its gradient and its states; so it is for torch's private modules (Dynamo, fake tensors) and for torchloom itself. What
autograd records of a shard is checked in the graph of the loss (`shard.direct_uses`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.convert_parameters import parameters_to_vector
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchloom._torch.subclasses import as_plain_tensors, is_for_machinery
from torchloom.errors import ShardError
from torchloom.shard.layout import ParamSpec

_FACTS = "_loom_shard"

# fmt: off
_SEES_A_PART = frozenset([
    # reductions
    "sum", "nansum", "mean", "nanmean", "norm", "vector_norm", "matrix_norm", "linalg_norm", "linalg_vector_norm", "std", "var", "std_mean",
    "var_mean", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all", "prod", "logsumexp", "median",
    "nanmedian", "mode", "quantile", "nanquantile", "count_nonzero", "histc", "unique", "trace",
    # order and shape
    "topk", "sort", "argsort", "kthvalue", "cumsum", "cumprod", "softmax", "log_softmax", "normalize", "view", "view_as",
    "reshape", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "t", "transpose", "permute",
    "T", "mT", "H", "mH", "adjoint", "swapaxes", "movedim", "narrow", "select", "index_select", "index_fill", "index_copy",
    "index_add", "gather", "scatter", "scatter_add", "masked_select", "nonzero", "take", "split", "chunk", "tensor_split", "unbind",
    "diag", "tril", "triu", "roll", "flip", "repeat", "tile", "stack", "cat", "__getitem__", "__setitem__", "__iter__",
    # products
    "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "dot", "vdot", "inner", "outer", "addmm", "addmv", "einsum", "linear", "embedding",
    "svd", "qr", "inverse", "det", "cdist", "cosine_similarity", "mse_loss", "l1_loss",
    # equal random numbers for unlike parts, on ranks with equal seeds
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "trunc_normal_",
    # values that leave torch
    "numpy", "__array__", "tolist", "item", "__reduce_ex__",
])
"""Functions whose result for a shard is none of the whole weight, by name without a trailing underscore, which writes."""
_COLLECTIVES = frozenset(["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
_READ_AS_IT_IS = frozenset([
    "device", "dtype", "layout", "requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_meta", "is_cuda", "itemsize", "element_size",
    "is_floating_point", "is_complex", "data_ptr", "untyped_storage", "_version", "backward",
])
"""What is read of a shard as of any tensor."""
_LEFT_TO_LOSSES = frozenset(["sum", "cat", "view", "reshape", "flatten"])
"""Those of them that a loss may take of a parameter itself; `shard.direct_uses` decides when it is differentiated."""
# fmt: on


class _Facts(NamedTuple):
    """Of which weight, or gradient of one, a tensor holds a part."""

    name: str
    shape: torch.Size
    kind: str = "parameter"


class _Answers:
    """What tensors that hold a shard do when Python calls a function of torch with them."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name, caller = _name_of(func), sys._getframe(1)
        if name in _READ_AS_IT_IS or is_for_machinery(func, caller):
            with as_plain_tensors():
                return func(*args, **named)
        if name == "grad":
            with as_plain_tensors():
                return _gradients(func(*args, **named), *args[-1:])
        answer = _WHOLE.get(name)
        if answer is not None:
            return answer(_facts_of(args[0]).shape, *args[1:], **named)
        first = next(each for each in _tensors((*args, *named.values())) if is_shard(each))
        facts = _facts_of(first)
        is_recorded = torch.is_grad_enabled() and first.requires_grad
        is_recorded &= caller.f_globals.get("__name__") != parameters_to_vector.__module__
        _check(name, facts, args, named, is_recorded=is_recorded)
        with as_plain_tensors():
            found = func(*args, **named)
            return _as_shards(found, first, facts)

    def __reduce_ex__(self, proto: Any) -> Any:
        raise _refused("pickle", _facts_of(self))


class _ComparesAsBase(type(nn.Parameter)):
    """Lets `type(param) in (Tensor, Parameter)` be true for a class of shards.

    Dynamo (`infer_subclass_type`) would trace the subclass's `__torch_function__`, and tables of torch that are keyed by
    types would not find it.
    """

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__bases__[-1]

    def __hash__(cls) -> int:
        return hash(cls.__bases__[-1])


class Shard(_Answers, Tensor, metaclass=_ComparesAsBase):
    """A rank's flat part of a weight, or of something that was computed of it element by element."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        with as_plain_tensors():
            twin = _marked(self.clone(), _facts_of(self))
        memo[id(self)] = twin
        return twin


class ShardParameter(_Answers, nn.Parameter, metaclass=_ComparesAsBase):
    """A parameter that holds this rank's flat shard, and answers as the whole weight."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with as_plain_tensors():
            twin = nn.Parameter(self.data.clone(), self.requires_grad)
        _answer_for(twin, _facts_of(self))
        memo[id(self)] = twin
        return twin


def hold_part(param: nn.Parameter, data: Tensor, spec: ParamSpec) -> None:
    """Give a parameter this rank's part as data; if that is a shard, it answers as the whole weight from now on.

    Args:
        param: a plain `nn.Parameter`; one of another class keeps its own answers.
        data: what this rank keeps.
        spec: how it is kept.
    """
    _give_data(param, data)
    if spec.mode == "sharded":
        _answer_for(param, _Facts(spec.name, torch.Size(spec.shape)))


def _answer_for(param: nn.Parameter, facts: _Facts) -> None:
    param.__dict__[_FACTS] = facts
    if type(param) is nn.Parameter:
        param.__class__ = ShardParameter


def hold_whole(param: nn.Parameter, data: Tensor) -> None:
    """Give a parameter that held a shard the whole weight as data, and make it a plain one again."""
    param.__dict__.pop(_FACTS, None)
    if type(param) is ShardParameter:
        param.__class__ = nn.Parameter  # type: ignore[bad-argument-type]
    _give_data(param, data)


def _give_data(param: nn.Parameter, data: Tensor) -> None:
    # A tensor that somebody computed from the parameter, such as a clone to compare with, keeps the node alive that
    # accumulates its gradients, and the node demands gradients of the shape that the parameter had. Torch makes a new
    # one for data of another dtype alone (VariableHooks::set_data in torch/csrc/autograd/variable.cpp).
    if param.shape != data.shape:
        dtype = torch.float16 if param.dtype != torch.float16 else torch.float32
        param.data = param.data.new_empty(0, dtype=dtype)
    param.data = data


def check_node_unhooked(param: nn.Parameter, name: str) -> None:
    """Refuse hooks of the node that accumulates a parameter's gradient, before `_give_data` or torch makes a new one.

    Raises:
        ShardError: it has some.
    """
    if not param.requires_grad:
        return
    with as_plain_tensors():
        node = get_gradient_edge(param).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)  # leads to the others, which nothing else shows
        others = len(handle.hooks_dict_ref() or ()) - 1
        handle.remove()
        if others > 0:
            raise ShardError(
                f"the parameter {name!r} has a hook on the node that accumulates its gradient, which torch replaces when its "
                "shape or dtype changes, so the hook would no longer run: remove it, and register one at the parameter of the "
                "sharded model (register_hook or register_post_accumulate_grad_hook), which stays"
            )


@functools.cache
def be_plain_in_steps() -> None:
    """Let parameters be plain while an optimizer steps them: each question to a shard takes microseconds.

    Call it behind all hooks that may refuse a step, as those after a step do not run then.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is ShardParameter:
                param.__class__ = nn.Parameter  # type: ignore[bad-argument-type]
                if type(param.grad) is Shard:
                    param.grad.__class__ = Tensor  # type: ignore[bad-argument-type]


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is nn.Parameter and _FACTS in param.__dict__:
                if param.grad is not None and _FACTS in param.grad.__dict__:
                    param.grad.__class__ = Shard
                param.__class__ = ShardParameter


def is_shard(value: object) -> bool:
    """Return whether a tensor holds one rank's part of a weight."""
    return isinstance(value, Tensor) and _FACTS in value.__dict__


def local_shard(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter as a plain flat tensor, padded, which shares its memory.

    Args:
        param: a parameter of a sharded model, or what was computed of one; a tensor that is no shard is returned detached.

    Example:
        >>> squares = local_shard(param).square().sum()  # doctest: +SKIP
        >>> total = torchloom.all_reduce(squares, "sum", name="squares of the weights")  # doctest: +SKIP
    """
    with as_plain_tensors():
        return param.detach()


def refused_collective(collective: str, shard: Tensor) -> ShardError:
    """Return the error of a collective that is given a shard."""
    return _no_collective(collective, _facts_of(shard))


def _facts_of(tensor: Any) -> _Facts:
    return tensor.__dict__[_FACTS]


def _marked(tensor: Tensor, facts: _Facts) -> Shard:
    made = tensor.as_subclass(Shard)
    made.__dict__[_FACTS] = facts
    return made


def _gradients(grads: Any, params: Any) -> Any:
    """Return gradients, or the one of one parameter; those of parameters that hold a shard are `Shard`s from now on."""
    if isinstance(grads, tuple):
        params = params if isinstance(params, (list, tuple)) else [params]
        return tuple(map(_gradients, grads, params))
    if type(grads) is Tensor and is_shard(params):
        grads.__dict__[_FACTS] = _facts_of(params)._replace(kind="gradient of")
        grads.__class__ = Shard
    return grads


def _as_shards(found: Any, first: Tensor, facts: _Facts) -> Any:
    """Mark the results of a call that hold an element for each one of the shard."""
    if isinstance(found, (list, tuple)) and type(found) in (list, tuple):
        return type(found)(_as_shards(each, first, facts) for each in found)
    if not isinstance(found, Tensor) or is_shard(found) or found.shape != first.shape:
        return found
    if found.requires_grad:
        return found  # shard.direct_uses looks at the graph
    return _marked(found, facts)


def _name_of(func: Any) -> str:
    """Return a function's name; that of the property for its getter."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", name)
    return name


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _check(
    name: str, facts: _Facts, args: tuple[Any, ...], named: dict[str, Any], *, is_recorded: bool
) -> None:
    """Refuse a call that would give another result than with the whole weight.

    Raises:
        ShardError: it would.
    """
    base = name if name in _SEES_A_PART or name.startswith("__") else name.rstrip("_")
    base = base.removeprefix("_foreach_")
    is_left = is_recorded and base in _LEFT_TO_LOSSES and args[1:] in ((), (-1,), (0,))
    if base in _COLLECTIVES:
        raise _no_collective(name, facts)
    if base in _SEES_A_PART and not is_left:
        raise _refused(name, facts)
    if base == "cat":
        return
    lists = [each for each in args if isinstance(each, (list, tuple))]
    if name.startswith("_foreach_"):
        for together in zip(*lists, strict=False):
            _check_beside(together, name)
    else:
        _check_beside([*_tensors((*args, *named.values()))], name)


def _check_beside(tensors: Sequence[Any], name: str) -> None:
    """Refuse a shard beside a tensor that is neither one number nor has an element for each one of the shard.

    Raises:
        ShardError: they do not belong together.
    """
    found = [each for each in tensors if isinstance(each, Tensor)]
    with as_plain_tensors():
        first = next((each for each in found if is_shard(each)), None)
        others = (
            [] if first is None else [e for e in found if e.numel() != 1 and e.shape != first.shape]
        )
    if others:
        other = "x".join(map(str, others[0].shape))
        raise ShardError(
            f"{name} takes the {_facts_of(first).kind} {_facts_of(first).name!r}, of which this rank holds one part, together with a tensor "
            f"of {other}: make copies and averages of weights after the model is sharded (copy.deepcopy(model), "
            "p.detach().clone()), or work on whole weights inside torchloom.shard.gathered(...)"
        )


def _refused(name: str, facts: _Facts) -> ShardError:
    if facts.kind == "parameter":
        how = (
            "use whole weights, on all ranks, inside torchloom.shard.gathered(...) or of full_state_dict(model), or this "
            "rank's part, torchloom.shard.local_shard(p)"
        )
    else:
        how = (
            "take norms by torch.nn.utils.get_total_norm or clip_grad_norm_, which count all ranks, the whole gradient by "
            "engine.full_gradient(p), or this rank's part by torchloom.shard.local_shard(p.grad)"
        )
    return ShardError(
        f"{name} is computed from the {facts.kind} {facts.name!r} itself, of which this rank holds one part: {how}"
    )


def _no_collective(name: str, facts: _Facts) -> ShardError:
    if facts.kind == "parameter":
        why = "torchloom keeps weights equal on all ranks; for whole weights use torchloom.shard.full_state_dict(model)"
    else:
        why = "it is the mean over all ranks already"
    return ShardError(
        f"{name} was given this rank's shard of the {facts.kind} {facts.name!r}, and ranks hold unlike parts of it: "
        f"leave it out, as {why}; torchloom.shard.local_shard(...) is this rank's part"
    )


def _size(shape: torch.Size, dim: int | None = None) -> torch.Size | int:
    return shape if dim is None else shape[dim]


def _stride(shape: torch.Size, dim: int | None = None) -> tuple[int, ...] | int:
    strides = tuple(math.prod(shape[each + 1 :]) for each in range(len(shape)))
    return strides if dim is None else strides[dim]


_WHOLE = {
    "shape": lambda shape: shape,
    "size": _size,
    "stride": _stride,
    "ndim": len,
    "dim": len,
    "ndimension": len,
    "numel": math.prod,
    "nelement": math.prod,
    "__len__": lambda shape: shape[0],
    "is_contiguous": lambda shape, **_: True,
}
"""What is answered for the whole weight, of its shape."""
