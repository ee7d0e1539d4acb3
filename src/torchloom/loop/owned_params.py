"""What this rank's optimizer steps: shards, slices of whole parameters, or whole parameters.

sharded   the parameter holds this rank's shard                                     (stages 2 and 3)
sliced    the parameter is whole, and holds this rank's slice while it is stepped   (stage 1)
whole     the parameter, equal on all ranks                         (stage 0, small parameters)

At every stage the optimizer holds the model's own parameters. So when users call `zero_grad`, add groups,
assign `.data` or look up a state, model and optimizer both see it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import EngineError, ShardError
from torchloom.loop.clip import Gradients
from torchloom.loop.ownership import Ownership, Unit
from torchloom.loop.slices import Slices, slice_of
from torchloom.runtime import Communicator
from torchloom.shard import Layout, ParamSpec, local_shard, owners_of, sync_in_backward
from torchloom.shard.classes import converted
from torchloom.shard.shards import clear_padding_
from torchloom.shard.state import gather_whole


class Leaf(NamedTuple):
    """One trainable parameter and how the optimizer steps it."""

    spec: ParamSpec
    param: nn.Parameter
    """The model's parameter, which the optimizer holds."""

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of what the optimizer steps: the shard, the slice, or the whole parameter."""
        return self.spec.part_shape

    @property
    def is_divided(self) -> bool:
        """Whether each rank of the shard group steps a different part of it."""
        return self.spec.is_divided


class OwnedParams:
    """The trainable parameters of a sharded model, as this rank's optimizer sees them."""

    def __init__(self, model: nn.Module, layout: Layout, comm: Communicator) -> None:
        self._layout, self._comm = layout, comm
        params = owners_of(model)
        self._leaves = [Leaf(s, params[s.name]) for s in layout if s.requires_grad]
        self._frozen = [(spec.name, params[spec.name]) for spec in layout if not spec.requires_grad]
        sliced = {e.spec.name: e.param for e in self._leaves if e.spec.is_sliced}
        self._slices = Slices(sliced, layout, comm)
        self.is_stepping = False
        """Whether parameters hold what the optimizer steps now."""
        self.ownership: Ownership | None = None
        """Which rank steps what the optimizer must see whole; None without an optimizer."""
        self._averages_in_backward = False
        """Whether backward passes average the gradients of whole parameters over ranks."""
        for each in self._leaves:
            _LOCALS.setdefault(each.param, weakref.WeakSet()).add(self)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves)

    def average_in_backward(self, model: nn.Module) -> None:
        """Let backward passes of `model` average the gradients of whole parameters from now on.

        Raises:
            ShardError: forward writes into parameters, which become copies.
        """
        sync_in_backward(model, True)
        self._averages_in_backward = True

    def check(self, params: Mapping[str, nn.Parameter]) -> None:
        """Raise unless these are the parameters that the optimizer steps.

        Raises:
            ShardError: one has been assigned anew, or was frozen when the model was sharded and is
                trained now; the optimizer would not train it. Or a sliced one has another shape, or
                shares memory with another one. Or one was converted to another dtype or to meta.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise ShardError(
                    f"parameter {name!r} was frozen when the model was sharded and requires a gradient "
                    "now: its gradient would be lost. Leave all parameters that will be trained "
                    "unfrozen until torchloom.initialize has returned, and freeze them then"
                )
        for each in self._leaves:
            if each.param.dtype != each.spec.dtype:  # of a module whose class is its own
                raise converted(each.param, each.spec.dtype, "model")
            if params[each.spec.name] is not each.param:
                raise ShardError(
                    f"parameter {each.spec.name!r} is assigned anew after the model was sharded: "
                    "the optimizer would not train the new one; write values into it inside "
                    "torchloom.shard.gathered(..., modifier_rank=0), or compute the weight in forward "
                    "as a plain tensor"
                )
        self._slices.prepare()

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Let each parameter hold what this rank's optimizer steps, inside a `with` block.

        Raises:
            ShardError: a sliced parameter has another shape, or shares memory with another one.
        """
        with self._slices.taken():
            yield

    @contextmanager
    def stepping(self, *, reduce: bool, bucket_bytes: int) -> Iterator[None]:
        """Let each parameter hold what is stepped, and the gradient for it, inside a `with` block.

        Drops gradients at the end. Call `settle` afterwards, to give all ranks the stepped slices.

        Args:
            reduce: gradients have accumulated locally and are averaged now; otherwise the backward
                pass has averaged them.
            bucket_bytes: size of the buckets in which gradients are averaged, in bytes.

        Raises:
            ShardError: a sliced parameter has another shape, or shares memory with another one.
        """
        self._slices.prepare()
        own = self._collect(reduce=reduce, bucket_bytes=bucket_bytes)
        try:
            self._slices.take(own)
            for each in self._leaves:
                if each.is_divided and each.param.grad is not None:
                    # Users' hooks (e.g. noise) may have written into the padding.
                    clear_padding_(each.param.grad, each.spec.numel, self._layout.rank)
            self.is_stepping = True
            yield
        finally:
            self.is_stepping = False
            if self.ownership is not None:
                self.ownership.restore()
            self._slices.leave()
            self.zero_grad()

    def is_owned(self, param: nn.Parameter) -> bool:
        """Say whether one rank steps a whole parameter for all others."""
        return self._unit(param) is not None

    def keeps_states(self, param: nn.Parameter) -> bool:
        """Say whether this rank keeps optimizer states of a parameter: not of those that others own."""
        unit = self._unit(param)
        return unit is None or unit.is_mine

    def _unit(self, param: nn.Parameter) -> Unit | None:
        return None if self.ownership is None else self.ownership.units.get(id(param))

    def begin_update(self) -> None:
        """Note that the optimizer is about to write into what it steps; `settle` gives it to all ranks."""
        self._slices.is_published = False

    def settle(self) -> None:
        """Give all ranks what the last step has written, even if a hook of the optimizer raised in it."""
        self._slices.settle()

    @property
    def waits_for_step(self) -> bool:
        """Whether there are gradients that only `stepping` will average over ranks."""
        is_local = self._layout.num_ranks > 1 and not self._averages_in_backward
        return any(
            each.param.grad is not None
            for each in self._leaves
            if each.spec.is_sliced or (is_local and each.spec.mode == "whole")
        )

    def _collect(self, *, reduce: bool, bucket_bytes: int) -> dict[str, Tensor]:
        """Average gradients; return those of slices, by name."""
        present = self._agree_on_used() if reduce else self._with_gradient()
        if reduce and self._layout.num_ranks > 1:
            return self._average(present, bucket_bytes)
        return {
            each.spec.name: slice_of(_gradient(each), each.spec.shard_numel, self._layout.rank)
            for each in present
            if each.spec.is_sliced
        }

    def _with_gradient(self) -> list[Leaf]:
        return [each for each in self._leaves if each.param.grad is not None]

    def _agree_on_used(self) -> list[Leaf]:
        """Return the leaves that any rank has a gradient for; the others contribute zeros."""
        if self._layout.num_ranks == 1:
            return self._with_gradient()
        device = self._leaves[0].param.device if self._leaves else torch.device("cpu")
        mine = [each.param.grad is not None for each in self._leaves]
        used = self._comm.any_of(mine, device, "which parameters have a gradient")
        chosen = [each for each, is_used in zip(self._leaves, used, strict=True) if is_used]
        for each in chosen:
            if each.param.grad is None:
                each.param.grad = torch.zeros_like(each.param)
        return chosen

    def _average(self, leaves: list[Leaf], bucket_bytes: int) -> dict[str, Tensor]:
        """Average in buckets: pack the next bucket while the previous one is sent."""
        own: dict[str, Tensor] = {}
        started: deque[tuple[list[Leaf], list[Tensor]]] = deque()
        for bucket in _buckets(leaves, bucket_bytes):
            started.append((bucket, self._begin(bucket)))
            if len(started) > 1:
                self._finish(*started.popleft(), own)
        for each in started:
            self._finish(*each, own)
        return own

    def _begin(self, bucket: list[Leaf]) -> list[Tensor]:
        spec, names = bucket[0].spec, [each.spec.name for each in bucket]
        grads = [_gradient(each) for each in bucket]
        if not spec.is_sliced:
            return self._comm.begin_sync(grads, spec.dtype, spec.wire_dtype, names)
        numels = [each.spec.shard_numel for each in bucket]
        return self._comm.begin_reduce(grads, numels, spec.dtype, spec.wire_dtype, names)

    def _finish(self, bucket: list[Leaf], results: list[Tensor], own: dict[str, Tensor]) -> None:
        self._comm.wait(results)
        for each, mean in zip(bucket, results, strict=True):
            each.param.grad = None
            if each.spec.is_sliced:
                own[each.spec.name] = mean
            elif mean.stride() == each.param.stride():
                each.param.grad = mean
            else:  # fused optimizers match gradient and parameter by their place in memory
                each.param.grad = torch.empty_like(each.param).copy_(mean)

    def gradients(self) -> Gradients:
        """Return the gradients of divided and of whole leaves."""
        found = Gradients(self._comm, self._layout.norm_dtype)
        for each in self._with_gradient():
            (found.divided if each.is_divided else found.whole).append(_gradient(each))
        return found

    def whole_gradient(self, param: Tensor, *, is_averaged: bool) -> Tensor | None:
        """Return the whole gradient of a parameter, averaged over ranks; None if it is not trained.

        All ranks must call. A rank without a gradient takes zeros.

        Args:
            param: one of the model's.
            is_averaged: backward passes average gradients of whole parameters; otherwise `stepping` will.
        """
        each = next((leaf for leaf in self._leaves if leaf.param is param), None)
        if each is None:
            return None
        spec = replace(each.spec, name=f"gradient of {each.spec.name}")
        grad = torch.zeros_like(local_shard(param)) if param.grad is None else param.grad.detach()
        is_slice = is_averaged and spec.is_sliced  # backward averages this rank's slice alone
        if is_slice:
            grad = slice_of(grad, each.spec.shard_numel, self._layout.rank)
        if is_slice or spec.mode == "sharded":
            return gather_whole(grad, spec, self._layout.handle)
        if is_averaged or self._layout.num_ranks == 1:
            return grad.clone()
        mean = self._comm.begin_sync([grad], spec.dtype, spec.wire_dtype, [spec.name])
        self._comm.wait(mean)
        return mean[0]

    def named_gradients(self) -> tuple[list[str], list[Tensor | None]]:
        """Return the names of all leaves and their gradients, in the model's order."""
        return [e.spec.name for e in self._leaves], [e.param.grad for e in self._leaves]

    def versions(self) -> list[tuple[int, int] | None]:
        """Return a version of each leaf's gradient, for `changed_gradients`; None without a gradient."""
        grads = (each.param.grad for each in self._leaves)
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def changed_gradients(self, versions: list[tuple[int, int] | None]) -> list[Tensor]:
        """Return the gradients that a backward pass has made or added to since `versions()`."""
        pairs = zip(self._leaves, versions, self.versions(), strict=True)
        return [_gradient(each) for each, old, new in pairs if new is not None and new != old]

    def present_gradients(self) -> list[Tensor]:
        """Return the gradients that the parameters hold, without None."""
        return [_gradient(each) for each in self._with_gradient()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for each in self._leaves:
            each.param.grad = None

    def keep_known(self, groups: Iterable[dict[str, list[nn.Parameter]]]) -> None:
        """Remove from an optimizer's groups the parameters that are not trained.

        Raises:
            EngineError: a group holds a trainable parameter that the model does not own.
        """
        known = {id(each.param) for each in self._leaves}
        for index, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in known and param.requires_grad:
                    raise EngineError(
                        f"the optimizer's group {index} holds a parameter of shape "
                        f"{tuple(param.shape)} that is not one of the model's trainable "
                        "parameters: build the optimizer from model.parameters() of the model "
                        "that you pass to torchloom.initialize"
                    )
            group["params"] = [param for param in group["params"] if id(param) in known]


_LOCALS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Trained parameter -> the `OwnedParams` that step it; several engines may share one."""


def has_engine(param: nn.Parameter) -> bool:
    """Say whether an engine counts the steps of a parameter."""
    return param in _LOCALS


def check_steps_alone(params: Iterable[Tensor]) -> None:
    """Raise if an optimizer may not step these parameters outside of `OwnedParams.stepping`.

    Raises:
        EngineError: gradients wait that are not averaged, or whose slices belong to other ranks.
    """
    owners = next(filter(None, map(_LOCALS.get, params)), ())
    if (
        owners
        and not any(owner.is_stepping for owner in owners)
        and any(owner.waits_for_step for owner in owners)
    ):
        raise EngineError(
            "optimizer.step() was called on gradients that are this rank's own: ranks would train to "
            "different weights; call engine.step(), which averages them and steps the optimizer"
        )


def _gradient(each: Leaf) -> Tensor:
    grad = each.param.grad
    assert grad is not None, each.spec.name
    return grad


def _buckets(leaves: list[Leaf], bucket_bytes: int) -> Iterator[list[Leaf]]:
    """Group leaves of one kind, in order, until their gradients reach `bucket_bytes`."""
    groups: dict[tuple[object, ...], list[Leaf]] = {}
    for each in leaves:
        key = (each.spec.is_sliced, each.spec.dtype, each.spec.wire_dtype)
        group = groups.setdefault(key, [])
        group.append(each)
        if sum(g.spec.numel * g.spec.dtype.itemsize for g in group) >= bucket_bytes:
            yield groups.pop(key)
    yield from groups.values()
