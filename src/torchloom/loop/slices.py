"""Let each rank step a slice of each whole weight (stage 1): during the step the parameter is the slice.

    before optimizer.step()    parameters and gradients become this rank's slices
    after it                   they are whole again; the ranks give each other the slices that they stepped

An engine does both around its step; in loops of one's own torch's public hooks of optimizers do. There backward
averages whole gradients, so between backward and step they are equal on all ranks, and clipping them is plain torch.

A weight lies at the front of a padded storage, so that all slices have equal length and are gathered in
place. If a user assigns new `.data`, the weight has another storage; `prepare` copies it into a padded one
before the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.untraced import leave_alone
from torchloom.errors import ShardError
from torchloom.runtime import Communicator
from torchloom.shard import Layout, is_sharded, owners_of
from torchloom.shard.shards import join, pad_storage, padded_flat, slice_of

_LIVING: weakref.WeakSet[Slices] = weakref.WeakSet()


class Slices:
    """The parameters of one model that are stepped in slices.

    Args:
        params: whole, as `shard_module` left them, by name; frozen ones are sliced once they are trained.
        layout: of the model.
        comm: of its ranks.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], layout: Layout, comm: Communicator
    ) -> None:
        self._all, self._layout, self._comm = dict(params), layout, comm
        # Held, so that no other tensor can come to lie at the same address.
        self._padded = {
            name: padded_flat(param.data, layout.world_size)
            for name, param in params.items()
            if param.requires_grad
        }
        self._whole: dict[str, tuple[Tensor, Tensor | None]] = {}
        """Data and gradient of each parameter that is a slice now."""
        self.is_published = True
        """Whether all ranks have what the last step has written."""
        _LIVING.add(self)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Those that are trained now, or were."""
        return {
            name: param
            for name, param in self._all.items()
            if param.requires_grad or name in self._padded
        }

    def prepare(self) -> None:
        """Give each weight that has been given new data a padded storage of its own.

        Raises:
            ShardError: it has another shape, or shares memory with another one.
        """
        if self._whole:
            return
        strangers = {
            name: param
            for name, param in self.params.items()
            if name not in self._padded or not _lies_in(param, self._padded[name])
        }
        for name, param in strangers.items():
            shape = self._layout[name].shape
            if tuple(param.shape) != shape:
                raise ShardError(
                    f"the parameter {name!r} has the shape {tuple(param.shape)} since it was given new "
                    f"data, and had {shape} when the model was sharded: write values of its own shape"
                )
        self._check_memory(strangers)
        for name, param in strangers.items():
            self._padded[name] = pad_storage(param.data, self._layout.world_size)
            param.data = join(self._padded[name], param.shape)

    def take(self, grads: Mapping[str, Tensor]) -> None:
        """Let each parameter be this rank's slice, with these gradients, until `leave`."""
        self.prepare()
        self._whole = {name: (param.data, param.grad) for name, param in self.params.items()}
        for name, param in self.params.items():
            param.grad = None
            param.data = self._own(name)
            param.grad = grads.get(name)

    def leave(self) -> None:
        """Let parameters and gradients be whole again; keep what was stepped."""
        for name, (data, grad) in self._whole.items():
            param, own = self.params[name], self._own(name)
            # An optimizer may have given the parameter new data.
            if _start_of(param) != _start_of(own) and param.numel() == own.numel():
                own.copy_(param.data.view(-1))
            param.grad = None
            param.data = data
            param.grad = grad
        self._whole = {}

    def settle(self) -> None:
        """Make parameters whole and equal on all ranks, also after a step that raised."""
        if self.is_published:
            return
        self.leave()
        self.is_published = True
        self._comm.residents.invalidate()
        if self._padded:
            names = list(self._padded)
            self._comm.gather_into(
                [self._own(name) for name in names], list(self._padded.values()), names
            )

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let each parameter be this rank's slice inside a `with` block, without a gradient."""
        if self._whole:
            yield
            return
        self.take({})
        try:
            yield
        finally:
            self.leave()

    def begin(self) -> None:
        """Let parameters and their averaged gradients be this rank's slices, until `settle`."""
        self.settle()
        layout = self._layout
        own = {
            name: slice_of(param.grad, layout[name].shard_numel, layout.rank)
            for name, param in self.params.items()
            if param.grad is not None
        }
        self.take(own)
        self.is_published = False

    def _own(self, name: str) -> Tensor:
        return self._padded[name].view(self._layout.world_size, -1)[self._layout.rank]

    def _check_memory(self, strangers: Collection[str]) -> None:
        """Refuse parameters that share memory: separate storages would silently untie them."""
        known: dict[tuple[int, int], str] = {}
        for name, param in self.params.items():
            other = known.setdefault(_start_of(param), name) if param.numel() else name
            if other != name and (other in strangers or name in strangers):
                raise ShardError(
                    f"the parameters {name!r} and {other!r} share memory since they were given new "
                    "data: tie them before torchloom.initialize, or give each a .clone()"
                )


def _lies_in(param: Tensor, padded: Tensor) -> bool:
    """Say whether a weight is still the front of its padded storage."""
    return (
        _start_of(param) == _start_of(padded)
        and param.dtype == padded.dtype
        and param.is_contiguous()
        and param.untyped_storage().nbytes() == padded.untyped_storage().nbytes()
    )


def _start_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins: its storage and the place in it. Tensors of a simulation have no addresses."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, Slices] = weakref.WeakKeyDictionary()
"""Of models in loops of one's own."""


def step_in_slices(model: nn.Module, layout: Layout, comm: Communicator) -> None:
    """Let optimizers of a loop step slices of a model's parameters from now on.

    Args:
        model: sharded at stage 1.
        layout: of it.
        comm: of its ranks.
    """
    owners = owners_of(model)
    params = {s.name: owners[s.name] for s in layout if s.is_sliced}
    _OF_MODELS[model] = Slices(params, layout, comm)


def settle_slices(model: nn.Module) -> None:
    """Make the parameters of a loop's model whole again after a step that raised on all ranks."""
    if model in _OF_MODELS:
        _OF_MODELS[model].settle()


def as_slices(model: nn.Module) -> AbstractContextManager[object]:
    """Return a `with` block in which the parameters of a loop's model are what its optimizer steps."""
    slices = _OF_MODELS.get(model)
    if slices is None:
        return nullcontext()
    slices.settle()
    return slices.taken()


def begin_step(optimizer: Optimizer) -> None:
    """Let the parameters that a loop's optimizer is about to step be slices."""
    for slices in _stepped_by(optimizer):
        slices.begin()


def end_step(optimizer: Optimizer) -> None:
    """Make the parameters that a loop's optimizer has stepped whole again. All ranks must call."""
    for slices in _stepped_by(optimizer):
        slices.settle()


@contextmanager
def written_in_slices(optimizer: Optimizer) -> Iterator[None]:
    """Let parameters be slices inside a `with` block, in which an optimizer writes into them outside of a step.

    All ranks must enter and leave it.
    """
    found = [each for each in _held_by(optimizer, list(_LIVING)) if each.is_published]
    for each in found:  # the others are slices already, as where one such method calls another
        each.begin()
    yield
    for each in found:
        each.settle()


leave_alone(begin_step, "it changes what parameters hold")
leave_alone(end_step, "it communicates")


def call_closure_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_always: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call the closure of a step while parameters are whole, as torch's optimizers do before they update.

    Optimizers that need a closure, such as those that call it more than once, are refused before.

    Args:
        optimizer: of a loop.
        args: of its `step`, itself first.
        kwargs: likewise.
        is_always: also where it steps no slices.

    Returns:
        The arguments with a closure that returns what the call did; None: nothing changes.
    """
    closure = next((each for each in (*args[1:], *kwargs.values()) if callable(each)), None)
    if closure is None or not (is_always or _stepped_by(optimizer)):
        return None
    with torch.enable_grad():
        loss = closure()

    def replaced(each: Any) -> Any:
        return (lambda: loss) if each is closure else each

    return tuple(map(replaced, args)), {name: replaced(each) for name, each in kwargs.items()}


def _stepped_by(optimizer: Optimizer) -> list[Slices]:
    return _held_by(optimizer, [each for model, each in _OF_MODELS.items() if is_sharded(model)])


def _held_by(optimizer: Optimizer, among: list[Slices]) -> list[Slices]:
    if not among:
        return []
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [each for each in among if any(id(param) in held for param in each.params.values())]
