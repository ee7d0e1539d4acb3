"""Stage 1 in loops of one's own: torch's optimizer steps a slice of each parameter, as an engine's does.

    before optimizer.step()    parameters and gradients become this rank's slices
    after it                   they are whole again; the ranks give each other the slices that they stepped

torch's public hooks of optimizers do both. Backward averages whole gradients, so between backward and step they are
equal on all ranks, and clipping them is plain torch.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchloom._torch.untraced import leave_alone
from torchloom.loop.slices import Slices, slice_of
from torchloom.runtime import Communicator
from torchloom.shard import Layout, is_sharded, keep_hook, owners_of
from torchloom.shard.shards import shard_numel_of

_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, _Sliced] = weakref.WeakKeyDictionary()


class _Sliced:
    """The slices of one model, and whether an optimizer is stepping them."""

    def __init__(self, params: dict[str, nn.Parameter], layout: Layout, comm: Communicator) -> None:
        self.params, self._layout, self._comm = params, layout, comm
        self.ids = frozenset(map(id, params.values()))
        self._slices = Slices(params, layout)
        self._open = ExitStack()
        self._is_open = False

    def taken(self) -> AbstractContextManager[None]:
        """Return a `with` block in which parameters are this rank's slices, without gradients."""
        self.settle()
        return self._slices.taken()

    def begin(self) -> None:
        """Let parameters and gradients be this rank's slices."""
        self.settle()
        self._slices.prepare()
        size, rank = self._layout.world_size, self._layout.rank
        own = {
            name: slice_of(param.grad, shard_numel_of(param.numel(), size), rank)
            for name, param in self.params.items()
            if param.grad is not None
        }
        self._open.enter_context(self._slices.taken())
        self._is_open = True
        for name, grad in own.items():
            self.params[name].grad = grad

    def settle(self) -> None:
        """Make parameters whole again and equal on all ranks, also after a step that raised."""
        if not self._is_open:
            return
        self._is_open = False
        self._open.close()
        names, own, whole = self._slices.split()
        self._comm.residents.invalidate()
        self._comm.gather_into(own, whole, names)


def step_in_slices(model: nn.Module, layout: Layout, comm: Communicator) -> None:
    """Let optimizers step slices of a model's parameters from now on.

    Args:
        model: sharded at stage 1.
        layout: of it.
        comm: of its ranks.
    """
    owners = owners_of(model)
    params = {s.name: owners[s.name] for s in layout if s.is_sliced and s.requires_grad}
    if not params:
        return
    sliced = _Sliced(params, layout, comm)
    _OF_MODELS[model] = sliced

    def settle(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            sliced.settle()

    # After a step that raised on all ranks, such as one that was interrupted.
    keep_hook(model, model.register_forward_pre_hook(settle))
    keep_hook(model, model.register_state_dict_pre_hook(settle))


def as_slices(model: nn.Module) -> AbstractContextManager[object]:
    """Return a `with` block in which a model's parameters are what its optimizer steps.

    Args:
        model: sharded, at any stage.
    """
    sliced = _OF_MODELS.get(model)
    return nullcontext() if sliced is None else sliced.taken()


def begin_step(optimizer: Optimizer) -> None:
    """Let the parameters that an optimizer is about to step be slices.

    Args:
        optimizer: of a loop.
    """
    for sliced in _stepped_by(optimizer):
        sliced.begin()


def call_closure_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call the closure of a step while parameters are whole, as torch's optimizers do before they update.

    Optimizers that need a closure, such as those that call it more than once, are refused before, by their trial step.

    Args:
        optimizer: of a loop.
        args: of its `step`, itself first.
        kwargs: likewise.

    Returns:
        The arguments with a closure that returns what the call did; None: nothing changes.
    """
    given = [each for each in (*args[1:], *kwargs.values()) if callable(each)]
    if not given or not _stepped_by(optimizer):
        return None
    closure = given[0]
    with torch.enable_grad():
        loss = closure()

    def replaced(each: Any) -> Any:
        return (lambda: loss) if each is closure else each

    return tuple(map(replaced, args)), {name: replaced(each) for name, each in kwargs.items()}


def end_step(optimizer: Optimizer) -> None:
    """Make the parameters that an optimizer has stepped whole again. All ranks must call.

    Args:
        optimizer: of a loop.
    """
    for sliced in _stepped_by(optimizer):
        sliced.settle()


def _stepped_by(optimizer: Optimizer) -> list[_Sliced]:
    living = [sliced for model, sliced in _OF_MODELS.items() if is_sharded(model)]
    if not living:
        return []
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [each for each in living if not each.ids.isdisjoint(stepped)]


leave_alone(begin_step, "it changes what parameters hold")
leave_alone(end_step, "it communicates")
