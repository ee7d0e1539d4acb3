"""Writes into gathered weights, which would be lost: found, and refused, or handed to the parameter.

A gathered weight is a copy for one use, as is one that is cast, or whose gradient is averaged in backward. A forward pass
has three ways to write into it, and each is looked at where it can be seen:

    weight.clamp_(),           eager: the copy's version counter, when the forward pass ends
    F.embedding(..., max_norm) compiled: the captured graph and the counters of its fake tensors, before
                               it is compiled
    weight.data.clamp_(),      no counter tells: sums over the copy's bits, when nobody else holds it, and where it
    weight.data = ...          lies; in the first forward passes and in ever fewer later ones

Outside of a forward pass, between two steps, modules hand out a `WeightCopy`. Where the parameter is whole on each rank,
writes and hooks go to the parameter itself. Where it is a shard, what is written into a value of `state_dict()`, on all
ranks, is cut into the shard; through `module.weight` it is refused, as ranks may read that one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchloom import ops
from torchloom._torch import modes
from torchloom._torch.subclasses import as_plain_tensors
from torchloom.errors import ShardError
from torchloom.graph import args_of, find, written


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


@dataclass(frozen=True, eq=False)
class _Held:
    """A weight whose bits are compared before it is let go."""

    param: str
    weight: Tensor
    address: int
    digest: Tensor

    @classmethod
    def of(cls, weight: Tensor, param: str) -> _Held:
        """Hold a weight as it was gathered."""
        return cls(param, weight, weight.data_ptr(), _digest(weight))

    @property
    def num_holders(self) -> tuple[int, int]:
        """Count who refers to the tensor, and to its memory."""
        return sys.getrefcount(self.weight), modes.num_storage_uses(self.weight)

    def is_written(self) -> bool:
        """Whether other values are in it, or under it, than the gather made."""
        if self.weight.data_ptr() != self.address:  # `weight.data = ...`
            return True
        return not torch.equal(self.digest, _digest(self.weight))


class _Pass:
    """A running forward pass of a sharded model, and the weights that it has gathered."""

    def __init__(self, *, keeps_tied: bool, compares: bool) -> None:
        self.tied: dict[tuple[int, bool], tuple[Tensor, Tensor]] | None = {} if keeps_tied else None
        """By shard, as a copy of the model has the same names; None: a tied weight is gathered for each use."""
        self.compares = compares
        self.counters: list[tuple[str, int, Tensor]] = []
        self.held: list[_Held] = []
        self.written: set[str] = set()

    def note(self, weight: Tensor, param: str) -> None:
        """Remember a weight by its counter, without its memory, and by its bits where they are compared."""
        is_transformed = modes.transform_level() is not None
        if not weight.is_inference():  # those count no writes
            counter = weight
            if not is_transformed:  # torch.func lets nobody assign `.data`
                counter = weight.detach()  # shares the counter
                counter.data = weight.new_empty(0)  # and lets go of the memory
            self.counters.append((param, weight._version, counter))
        if self.compares and not is_transformed and type(weight) is Tensor:
            alone = _Held("", torch.empty(()), 0, weight).num_holders
            self.settle(lambda each: each.num_holders == alone)
            self.held.append(_Held.of(weight, param))

    def settle(self, is_done: Callable[[_Held], bool]) -> None:
        """Compare those weights that are done with, and let go of them."""
        done = {each: is_done(each) for each in self.held}
        self.held = [each for each in self.held if not done[each]]
        self.written |= {each.param for each in done if done[each] and each.is_written()}

    def all_written(self) -> set[str]:
        """Return the parameters whose weights were written, when the pass has ended."""
        self.settle(lambda _: True)
        counted = {
            param for param, version, counter in self.counters if counter._version != version
        }
        return self.written | counted


class Writes:
    """The running eager forward passes of sharded models, the innermost last."""

    def __init__(self) -> None:
        self._passes: list[_Pass] = []

    @property
    def is_open(self) -> bool:
        """Whether an eager forward pass of a sharded model runs."""
        return bool(self._passes)

    def open(self, *, keeps_tied: bool, compares: bool) -> None:
        """Enter a forward pass.

        Args:
            keeps_tied: whether a tied weight is gathered once, not for each use.
            compares: whether writes that no counter tells are looked for.
        """
        self._passes.append(_Pass(keeps_tied=keeps_tied, compares=compares))

    def once(self, shard: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """Return the tied weight of a shard that was gathered earlier in this forward pass, or gather it now."""
        known = self._passes[-1].tied if self._passes else None
        if known is None:
            return gather()
        key = id(shard), torch.is_grad_enabled()
        if key not in known:
            known[key] = shard, gather()
        return known[key][1]

    def note(self, weight: Tensor, param: str) -> Tensor:
        """Remember a weight that a forward pass gets; return it."""
        if self._passes:
            self._passes[-1].note(weight, param)
        return weight

    def noting(
        self, graph: Callable[..., Sequence[Any]], copies: Mapping[int, str]
    ) -> Callable[..., Sequence[Any]]:
        """Return what calls a compiled graph and notes the weights among its results.

        Args:
            graph: the code.
            copies: parameters by the place of their copies among the results: code behind a graph break reads them.
        """

        def run(*args: Any) -> Sequence[Any]:
            found = graph(*args)
            for place, param in copies.items():
                self.note(found[place], param)
            return found

        return run if copies else graph

    def close(self) -> None:
        """Leave a forward pass.

        Raises:
            ShardError: a weight was written in it.
        """
        if written := self._passes.pop().all_written():
            raise lost(written)


def _digest(weight: Tensor) -> Tensor:
    """Return sums over the bits of a tensor: of all, and for each dim weighted by the index along it."""
    with modes.without_modes(), torch.no_grad():
        bits = weight.detach().contiguous().view(_BITS[weight.dtype.itemsize])
        sums = [bits.sum(dtype=torch.int64)]
        for dim, size in enumerate(bits.shape):
            others = [each for each in range(bits.dim()) if each != dim]
            along = bits.sum(others, dtype=torch.int64) if others else bits.long()
            sums.append((along * torch.arange(size, device=bits.device)).sum())
        return torch.stack(sums)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        for op in _COPIES
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


def handed_out(gm: fx.GraphModule) -> dict[int, str]:
    """Return the parameters whose copies a captured graph returns, by their place among its results."""
    results = args_of(gm.graph.output_node())[0]
    return {
        place: args_of(node)[-1]
        for place, node in enumerate(results if isinstance(results, (tuple, list)) else [])
        if isinstance(node, fx.Node) and node.target in _COPIES
    }


_COPIES = (ops.gather, ops.replicate, ops.cast)


def _fake(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


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
