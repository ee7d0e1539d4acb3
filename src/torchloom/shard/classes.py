"""The generated classes whose properties gather.

    module.weight   ->   torchloom::gather(module._parameters["weight"], ...)

One class is made per (module class, what its properties do), never one per instance: Dynamo
re-examines every class it meets (a 16-layer decoder traced 1.75x slower with a class per
instance). What differs between instances, the parameter's full name, is kept in the instance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchloom import ops
from torchloom._torch import modes
from torchloom.errors import ShardError
from torchloom.position import POSITION
from torchloom.shard.layout import ParamSpec
from torchloom.shard.leaf_modules import HELD, leaf_forward
from torchloom.shard.state import ORIGINAL, load_from_state_dict, save_to_state_dict
from torchloom.shard.writes import WRITES, WeightCopy, in_module_call, weight_copy

_CLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}


def sharded_class(
    base: type[nn.Module], specs: Mapping[str, ParamSpec], handle: str, *, is_leaf: bool = False
) -> type[nn.Module]:
    """Return the subclass of `base` whose properties gather the parameters in `specs`.

    Args:
        base: the module's own class.
        specs: facts by local parameter name.
        handle: communicator that the gathers name.
        is_leaf: whether its calls gather all that is in it.
    """
    facts = tuple((attr, _facts(spec)) for attr, spec in sorted(specs.items()))
    key = (base, facts, handle, is_leaf)
    if key not in _CLASSES:
        body: dict[str, Any] = {
            attr: property(_getter(attr, spec, handle)) for attr, spec in specs.items()
        }
        if issubclass(base, nn.RNNBase):
            body["_flat_weights"] = property(_rnn_weights, _ignore)
        if is_leaf:
            body["forward"] = leaf_forward(base.forward)
        body[ORIGINAL] = base
        body["register_parameter"] = _register_parameter
        body["__delattr__"] = _delattr
        body["_apply"] = _apply
        body["_save_to_state_dict"] = save_to_state_dict
        body["_load_from_state_dict"] = load_from_state_dict
        body["__module__"], body["__qualname__"] = base.__module__, base.__qualname__
        body["__deepcopy__"], body["__reduce_ex__"] = _deepcopy, _refuse_pickle
        _CLASSES[key] = type(base.__name__, (base,), body)
    return _CLASSES[key]


def _facts(spec: ParamSpec) -> tuple[Any, ...]:
    return (spec.shape, spec.mode, spec.dtype, spec.compute_dtype, spec.wire_dtype, spec.is_tied)


def _getter(attr: str, spec: ParamSpec, handle: str) -> Callable[[Any], Tensor]:
    """Build the property's function; everything that it closes over is a constant to Dynamo.

    Dynamo spends about a millisecond for each Python function that a property calls, in each layer.
    """
    shape, dtype, wire = torch.Size(spec.shape), spec.compute_dtype, spec.wire_dtype
    is_sharded = spec.mode == "sharded"

    def gather(param: Tensor, name: str) -> Tensor:
        return ops.gather(param, list(shape), dtype, wire, handle, name)

    def replicate(param: Tensor, name: str) -> Tensor:
        return ops.replicate(param, dtype, wire, handle, name)

    def cast(param: Tensor, name: str) -> Tensor:
        if torch.compiler.is_compiling():
            return ops.cast(param, dtype, name)
        return param.to(dtype)

    make = {"sharded": gather, "synced": replicate, "whole": cast}[spec.mode]

    def noted(self: Any) -> Tensor:
        param = self._parameters[attr]
        # Somebody put a whole weight of his own there, as torch.func.functional_call does: its gradient is nobody else's.
        if param.shape == shape if is_sharded else not isinstance(param, nn.Parameter):
            return param.to(dtype)
        name = self._loom_names[attr]
        if torch.compiler.is_compiling():
            return make(param, name)
        return _handed_out(make, param, name, is_whole=not is_sharded)

    if not spec.is_tied or spec.mode == "whole":
        return noted

    def once_per_forward(self: Any) -> Tensor:
        # One gather per forward keeps the sum of a tied parameter's gradients local, as in DDP.
        # Compiled code does the same by the pass `dedupe_gathers`.
        if torch.compiler.is_compiling() or id(self._parameters[attr]) in HELD:
            return noted(self)
        return WRITES.once(self._parameters[attr], lambda: noted(self))

    return once_per_forward


def _handed_out(
    make: Callable[[Tensor, str], Tensor], param: nn.Parameter, name: str, *, is_whole: bool
) -> Tensor:
    """Return a weight as its module gives it to eager code, inside of a forward or outside of any."""
    held = HELD.get(id(param))
    if held is not None:
        return held
    if WRITES.is_open or modes.transform_level() is not None or in_module_call():
        return WRITES.note(make(param, name), name)
    with POSITION.gathering("outside of a forward"):
        return weight_copy(make(param, name), param if is_whole else None, name)


def _rnn_weights(self: nn.RNNBase) -> list[Tensor]:
    return [getattr(self, name) for name in self._flat_weights_names]


def _ignore(self: nn.RNNBase, value: object) -> None:
    """Recurrent layers cache a list of their parameters; ours is made anew at every use."""


def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Run `Module.to` and the like, unless parameters would change: layouts and optimizers rely on them."""

    def applied(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        if isinstance(tensor, nn.Parameter) and (made.dtype != tensor.dtype or made.is_meta):
            raise converted(made, tensor.dtype, type(self).__name__)
        return made

    return getattr(type(self), ORIGINAL)._apply(self, applied, recurse)


def converted(made: Tensor, dtype: torch.dtype, owner: str) -> ShardError:
    """Return the error about a parameter that is converted after it was sharded.

    Args:
        made: what becomes of the parameter.
        dtype: in which it is kept.
        owner: of the parameter.
    """
    return ShardError(
        f"a parameter of this {owner} would go from {dtype} to {'meta' if made.is_meta else made.dtype} after the "
        "model was sharded, when optimizers and other ranks count on it: convert the model before, or choose the "
        'dtype to compute in by "bf16": {"enabled": true} or torchloom.shard.Precision(compute=torch.bfloat16)'
    )


def _register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
    """Refuse to put a whole weight where the property expects this rank's shard."""
    if name in self._loom_names:
        raise ShardError(
            f"parameter {self._loom_names[name]!r} is assigned anew after the model was sharded: "
            "the optimizer would not train the new one; write values into it inside "
            "torchloom.shard.gathered(..., modifier_rank=0), or compute the weight in forward as a plain "
            "tensor"
        )
    if isinstance(param, WeightCopy):  # torch.nn.utils.prune registers what a module hands out
        raise _reparametrized(param.param_name)
    getattr(type(self), ORIGINAL).register_parameter(self, name, param)


def _delattr(self: Any, name: str) -> None:
    if name in self._loom_names:  # as torch.nn.utils.parametrize does
        raise _reparametrized(self._loom_names[name])
    getattr(type(self), ORIGINAL).__delattr__(self, name)


def _reparametrized(name: str) -> ShardError:
    return ShardError(
        f"parameter {name!r} would be replaced by one under another name after the model was sharded: apply pruning, "
        "weight_norm and other parametrizations before the model is sharded"
    )


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    twin = type(self).__new__(type(self))
    memo[id(self)] = twin
    # As torch's own __getstate__ says: compiled code is bound to the module that it was compiled for.
    state = {name: value for name, value in vars(self).items() if name != "_compiled_call_impl"}
    twin.__dict__ = copy.deepcopy(state, memo)
    return twin


def _refuse_pickle(self: nn.Module, protocol: int) -> Any:
    raise TypeError(
        f"a sharded {type(self).__name__} cannot be pickled: it holds one rank's shards. Save "
        "model.state_dict(), or call torchloom.shard.unshard(model) first"
    )
