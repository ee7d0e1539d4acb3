"""Writes into gathered weights, which would be lost: found, and refused, or handed to the parameter.

A gathered weight is a copy for one use, as is one that is cast, or whose gradient is averaged in backward. A forward pass
has three ways to write into it, and each is looked at where it can be seen:

    weight.clamp_(),           eager: the copy's version counter, when the forward pass ends
    F.embedding(..., max_norm) compiled: the captured graph and the counters of its fake tensors, before
                               it is compiled
    weight.data.clamp_(),      they leave no trace in a counter, so the code of `forward` is read when the
    weight.data = ...          model is sharded, and that of the methods that it calls and of hooks

Outside of a forward pass, between two steps, modules hand out a `WeightCopy`. Where the parameter is whole on each rank,
writes and hooks go to the parameter itself. Where it is a shard, what is written into a value of `state_dict()`, on all
ranks, is cut into the shard; through `module.weight` it is refused, as ranks may read that one by one.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchloom import ops
from torchloom._torch import modes
from torchloom._torch.module_calls import forward_hooks
from torchloom._torch.subclasses import as_plain_tensors
from torchloom.errors import ShardError
from torchloom.graph import args_of, find, is_in_place_name, written
from torchloom.shard.layout import Layout


def lost(names: Collection[str]) -> ShardError:
    """Return the error for writes into these parameters."""
    first = min(names)
    more = f" (and into {len(names) - 1} more)" if len(names) > 1 else ""
    return ShardError(
        f"forward writes into the weight {first!r}{more}, which is sharded, cast or averaged in backward: what "
        "it sees is a copy for one use, so the write would be lost. Compute the weight as a value "
        "(torch.renorm(self.weight, ...) passed to the operator), write it after the step inside "
        "torchloom.shard.gathered(..., modifier_rank=0), or use ZeRO stage 0 or 1 in fp32 and without "
        "engine.compile()"
    )


class Writes:
    """The weights that were gathered in the running eager forward passes: their version counters, and tied ones."""

    def __init__(self) -> None:
        self._tied: list[dict[tuple[int, bool], tuple[Tensor, Tensor]] | None] = []
        """For each pass, its tied weights by shard, as a copy of the model has the same names; None: it keeps none."""
        self._seen: list[tuple[str, int, Tensor]] = []

    @property
    def is_open(self) -> bool:
        """Whether an eager forward pass of a sharded model runs."""
        return bool(self._tied)

    def open(self, *, keeps_tied: bool) -> int:
        """Enter a forward pass, in which a tied weight is gathered once or for each use; returns what to hand to `close`."""
        self._tied.append({} if keeps_tied else None)
        return len(self._seen)

    def once(self, shard: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """Return the tied weight of a shard that was gathered earlier in this forward pass, or gather it now."""
        known = self._tied[-1] if self._tied else None
        if known is None:
            return gather()
        key = id(shard), torch.is_grad_enabled()
        if key not in known:
            known[key] = shard, gather()
        return known[key][1]

    def note(self, weight: Tensor, param: str) -> Tensor:
        """Remember a weight by its counter, without its memory; return the weight."""
        if self._tied and not weight.is_inference():  # those count no writes
            counter = weight
            if modes.transform_level() is None:  # torch.func lets nobody assign `.data`
                counter = weight.detach()  # shares the counter
                counter.data = weight.new_empty(0)  # and lets go of the memory
            self._seen.append((param, weight._version, counter))
        return weight

    def close(self, start: int) -> None:
        """Leave a forward pass.

        Raises:
            ShardError: a weight was written in it.
        """
        self._tied.pop()
        seen, self._seen[start:] = self._seen[start:], []
        if written := {param for param, version, counter in seen if counter._version != version}:
            raise lost(written)


WRITES = Writes()
"""Of this process; empty outside of eager forward passes of sharded models."""


def check_graph(gm: fx.GraphModule) -> None:
    """Refuse a captured graph that writes into a weight that is a copy.

    Raises:
        ShardError: it does.
    """
    parts = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
    copies = [
        (node, args_of(node)[-1])
        for part in parts
        for op in (ops.gather, ops.replicate, ops.cast)
        for node in find(part.graph, op)
    ]
    # Operators write in more ways than their names and schemas tell; fakes count writes as tensors do.
    params = {param for node, param in copies if modes.num_writes(_fake(node))}
    weights = {modes.storage_id(_fake(node)): param for node, param in copies}
    weights.pop(None, None)
    if weights:
        params |= {
            weights[storage]
            for part in parts
            for node in part.graph.nodes
            for target in written(node)
            if (storage := modes.storage_id(_fake(target))) in weights
        }
    if params:
        raise lost(params)


def _fake(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def check_code(model: nn.Module, layout: Layout) -> None:
    """Refuse a model whose `forward` assigns the `.data` of a parameter of which it sees a copy, or writes in it.

    Args:
        model: whose code is read.
        layout: of its parameters.

    Raises:
        ShardError: it does.
    """
    modules = dict(model.named_modules())
    code_of = functools.cache(_code_of_forward)
    copied = {
        (owner.module, owner.attr): spec.name
        for spec in layout
        if spec.mode != "whole" or spec.compute_dtype != spec.dtype
        for owner in spec.owners
    }
    written = {
        copied[key]
        for path, module in modules.items()
        for code, root in [*code_of(type(module)), *_code_of_hooks(module)]
        for inner, attr in _written_through_data(code, root)
        if (key := (f"{path}.{inner}".strip("."), attr)) in copied
    }
    if written:
        raise lost(written)


@functools.cache
def _written_through_data(code: CodeType, root: str) -> list[tuple[str, str]]:
    """Return what code writes through `data` of weights of a module: by path from it, and name.

    Args:
        code: of a function.
        root: the variable that holds the module.
    """
    found: list[tuple[str, str]] = []
    steps = _instructions(code)
    for start, first in enumerate(steps):
        if not first.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or first.argval != root:
            continue
        names = [
            each.argval
            for each in itertools.takewhile(
                lambda each: each.opname.startswith("LOAD_ATTR"), steps[start + 1 :]
            )
        ]
        rest = steps[start + 1 + len(names) :]
        is_written = rest[0].opname == "STORE_ATTR" and rest[0].argval == "data"
        if rest[0].opname in ("COPY", "DUP_TOP"):  # weight.data *= 2
            is_written = rest[1].opname.startswith("LOAD_ATTR") and rest[1].argval == "data"
        elif "data" in names:
            behind = names[names.index("data") + 1 :]  # calls as well, since Python 3.12
            del names[names.index("data") :]
            last = next(each for each in rest if each.opname not in _OF_INDICES)
            called = behind or [str(last.argval)]
            is_written = is_in_place_name(called[0]) or (not behind and last.opname in _STORES)
        if is_written and names:
            found.append((".".join(names[:-1]), names[-1]))
    return found


_OF_INDICES = {"LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE", "BINARY_SUBSCR"}
_OF_INDICES |= {"BINARY_SLICE"}
_STORES = ("STORE_SUBSCR", "STORE_SLICE")


def _code_of_hooks(module: nn.Module) -> Iterator[tuple[CodeType, str]]:
    """Yield the code of hooks around a module's forward, and the variable that holds the module."""
    for hook in forward_hooks(module):
        code = getattr(hook, "__code__", None)
        place = int(isinstance(hook, MethodType))
        if code is not None and len(code.co_varnames) > place:
            yield code, code.co_varnames[place]


def _code_of_forward(kind: type[nn.Module]) -> list[tuple[CodeType, str]]:
    """Return the code of a module's forward and of the methods that it calls of `self` and of its bases, with `self`'s name."""
    found: dict[CodeType, None] = {}
    names = ["forward"]
    for name in names:  # grows
        for base in kind.__mro__:
            code = getattr(vars(base).get(name), "__code__", None)
            if code is None:
                continue
            found[code] = None
            steps = _instructions(code)
            names += [
                two.argval
                for one, two in itertools.pairwise(steps)
                if one.opname.startswith("LOAD_FAST")
                and (one.argval,) == code.co_varnames[:1]
                and two.opname.startswith(("LOAD_METHOD", "LOAD_ATTR"))
                and two.argval not in names
            ]
            if "super" not in code.co_names:
                break
    return [(code, code.co_varnames[0]) for code in found if code.co_varnames]


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname != "CACHE"]


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
