"""Gathered copies that user code gets outside of a forward pass: they read as the weight and lose no write.

    between two steps      module.weight.clamp_(-1, 1), module.weight.data[:5] = 0, module.weight.register_hook(f)
    averages of weights    for name, value in ema.state_dict().items(): value.lerp_(now[name], 0.01)

Without more, such a write would be lost without a word. Where the parameter is whole on each rank, writes and hooks go to
the parameter itself. Where it is a shard, what is written into a value of `state_dict()`, on all ranks, is cut into the
shard; through `module.weight` it is refused, as ranks may read that one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchloom._torch.subclasses import as_plain_tensors
from torchloom.errors import ShardError

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_PROPERTIES = {getattr(Tensor, name): name for name in ("data", "grad", "requires_grad")}


_CALL = nn.Module.__call__.__code__


class WeightCopy(Tensor):
    """A weight that was looked up outside of forward."""

    param: nn.Parameter | None
    """The parameter, where it is whole on this rank and this is all of it; otherwise None."""
    param_name: str
    keep: Callable[[], None] | None = None
    """Cuts what the copy holds into the shard; None: writes are refused, or go to `param`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        kept = []
        for target in _written(func, args, named):
            if target.keep is not None and _is_in_place(func):
                kept.append(target.keep)
                continue
            if target.param is None:
                raise _refused(target.param_name)
            replaced = {id(target): target.param}
            args = tuple(replaced.get(id(each), each) for each in args)
            named = {key: replaced.get(id(each), each) for key, each in named.items()}
        with as_plain_tensors():
            found = func(*args, **named)
            for each in kept:
                each()
        source = next((each for each in args if isinstance(each, WeightCopy)), None)
        if source is None or not isinstance(found, Tensor) or not _shares(found, source):
            return found
        return weight_copy(found, None, source.param_name, keep=source.keep)

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain(self).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), _plain(self).clone())


def in_module_call() -> bool:
    """Say whether some module is being called: behind a graph break, only the stack tells."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def weight_copy(
    weight: Tensor,
    param: nn.Parameter | None,
    name: str,
    *,
    keep: Callable[[], None] | None = None,
) -> Tensor:
    """Return a weight that refuses writes, or hands them to its parameter.

    Args:
        weight: a copy.
        param: the parameter, where it is whole; None: writes are refused, or kept.
        name: of the parameter.
        keep: is called after each write into the copy.
    """
    made: Any = weight.as_subclass(WeightCopy)
    made.param, made.param_name, made.keep = param, name, keep
    return made


def _plain(weight: Tensor) -> Tensor:
    with as_plain_tensors():
        return weight.detach()


def _is_in_place(func: Any) -> bool:
    return getattr(func, "__name__", "") != "__set__" and func.__name__ not in _HOOKS


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WeightCopy]:
    """Return the weights that a call writes, hooks, or asks for what only a parameter has."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = _PROPERTIES.get(getattr(func, "__self__", None))
        is_meant = attribute is not None and (name == "__set__" or attribute != "requires_grad")
        if name == "__get__" and attribute == "data" and args[0].param is None:
            is_meant = False  # reads: a view that refuses writes as well
        meant = args[:1] if is_meant else ()
    elif name in _HOOKS or name == "__setitem__":
        meant = args[:1]
    elif name.startswith("__i") and name.endswith("__"):
        meant = args[:1] if name not in ("__int__", "__index__", "__invert__") else ()
    elif name.endswith("_") and not name.endswith("__"):
        meant = args[:1] or tuple(kwargs.values())[:1]
    else:
        meant = ()
    outs = kwargs.get("out")
    outs = outs if isinstance(outs, (tuple, list)) else (outs,)
    return [each for each in _flat((*meant, *outs)) if isinstance(each, WeightCopy)]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from each
        else:
            yield each


def _shares(found: Tensor, source: Tensor) -> bool:
    """Say whether a result is a view of a weight, so that a write into it would be one into the copy."""
    if type(found) is not Tensor or found.layout != torch.strided or found.is_meta:
        return False
    with as_plain_tensors():
        mine, other = found.untyped_storage(), source.untyped_storage()
        return mine.nbytes() > 0 and mine.data_ptr() == other.data_ptr()


def _refused(name: str) -> ShardError:
    return ShardError(
        f"the weight {name!r} is written, hooked, or asked for its gradient through its module outside of forward, "
        "where a sharded model hands out a copy: write inside torchloom.shard.gathered(..., modifier_rank=0), and look "
        "for hooks and gradients at dict(model.named_parameters())"
    )
