"""What an engine does with losses: it checks them, scales them, and counts their backward passes.

engine.backward    scales a loss for fp16 and accumulation
loss.backward()    does the same: it goes from the loss to the nearest marks, which name the engine and the loss scale
forward            marks the autograd nodes of an engine's outputs; `engine.scale` marks the loss that it has scaled

A loss may depend on several engines' models: its backward gives gradients to all of them. Engines whose gradients it
changed remember how it was scaled, and may step where they scale their own losses equally.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from torchloom._torch.autograd import RunBackward, replace_backward
from torchloom._torch.modes import is_traced
from torchloom._torch.untraced import leave_alone
from torchloom.errors import EngineError
from torchloom.loop.owned_params import OwnedParams
from torchloom.shard.nested import map_tensors

_KEY = "torchloom_engine"
"""Of a mark among the metadata of an autograd node."""


class _Mark(NamedTuple):
    engine: weakref.ref[Any]
    """The `Engine`."""
    loss_scale: float
    """By what the value is multiplied."""


def mark(values: Any, engine: object, loss_scale: float = 1.0) -> None:
    """Mark the tensors in some values as outputs of an engine, or as a loss that it has scaled."""

    def note(tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            _metadata_of(tensor.grad_fn)[_KEY] = _Mark(weakref.ref(engine), loss_scale)

    map_tensors(values, note)


leave_alone(mark, "it marks nodes of autograd's graph")


def is_scaled(loss: Tensor) -> bool:
    """Say whether a tensor is what `Engine.scale` has returned."""
    found = None if loss.grad_fn is None else _metadata_of(loss.grad_fn).get(_KEY)
    return found is not None and found.loss_scale != 1.0


@functools.cache
def follow_user_backward(shared: SharedLoss) -> None:
    """Let torch's `backward` scale and count a loss of an engine's outputs as that engine does."""
    replace_backward(functools.partial(_following, shared))


def _following(shared: SharedLoss, run_backward: RunBackward) -> RunBackward:
    def run(outputs: Sequence[Any], grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        accumulates = kwargs.get("accumulate_grad", False) and not shared.is_running
        engine = None if not accumulates or is_traced(outputs) else _engine_of(outputs)
        if engine is None:
            return run_backward(outputs, grads, *args, **kwargs)
        num_micro_steps = engine.gradient_accumulation_steps()
        if num_micro_steps > 1:
            grads = tuple(None if each is None else each / num_micro_steps for each in grads)
        with engine.in_backward(_loss_of(outputs, grads, engine.loss_scale)):
            return run_backward(outputs, grads, *args, **kwargs)

    leave_alone(run, "it looks at autograd's graph")
    return run


def _engine_of(outputs: Sequence[Any]) -> Any:
    """Return the engine whose outputs a loss is made of; of several engines the one nearest to the loss.

    Raises:
        EngineError: the loss lacks that engine's loss scale.
    """
    found = None
    for each in _marks(outputs):
        engine = each.engine()
        if engine is None:
            continue
        if each.loss_scale != engine.loss_scale:
            raise EngineError(
                f"loss.backward() was called on a loss scaled by {each.loss_scale:g}, and the loss scale "
                f"of fp16 is {engine.loss_scale:g}: call engine.scale(loss).backward() or "
                "engine.backward(loss)"
            )
        found = found or engine
    return found


def _marks(outputs: Sequence[Any]) -> Iterator[_Mark]:
    """Go through an autograd graph; yield the first mark on each way down."""
    roots = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs]
    seen: set[Node] = set()
    for node in roots:  # which grow
        if node is None or node in seen:
            continue
        seen.add(node)
        found = _metadata_of(node).get(_KEY)
        if found is None:
            roots += [each for each, _ in node.next_functions]
        else:
            yield found


def _metadata_of(node: Any) -> dict[str, Any]:
    return node.metadata  # a property, whatever torch's own annotation says


def _loss_of(outputs: Sequence[Any], grads: Sequence[Any], loss_scale: float) -> Tensor | None:
    """Return the value that a backward pass begins at, as `Engine.backward` notes it; None for several."""
    loss = outputs[0]
    if len(outputs) > 1 or not isinstance(loss, Tensor) or loss.numel() != 1 or grads[0] is None:
        return None
    value = loss.detach() * grads[0].detach()
    return value if loss_scale == 1.0 else value / loss_scale


def check_loss(loss: Any) -> None:
    """Refuse what backward could not start from, in words that say what to do.

    Raises:
        EngineError: not a tensor, not one number, scaled already, or without a gradient.
    """
    if not isinstance(loss, Tensor):
        raise EngineError(
            f"backward() needs the loss tensor, got {type(loss).__name__}: pass the model's loss"
        )
    if loss.numel() != 1:
        raise EngineError(
            f"the loss has shape {tuple(loss.shape)}, it must be one number: reduce it, e.g. "
            "loss.mean()"
        )
    if not loss.requires_grad:
        raise EngineError(
            "the loss does not depend on any trainable parameter: it was computed under no_grad, "
            "detached, or every parameter is frozen"
        )
    if is_scaled(loss):
        raise EngineError(
            "the loss is multiplied by the loss scale already: call engine.scale(loss).backward(), or "
            "engine.backward(loss), which scales it by itself"
        )


class Scaling(NamedTuple):
    """What a loss is divided and multiplied by before backward."""

    accumulation: int
    loss_scale: float


@dataclass(eq=False)
class Share:
    """What one engine has got from the losses of others since its last step."""

    local: OwnedParams
    _got: list[tuple[Scaling, weakref.ref[Tensor]]] = field(default_factory=list, init=False)
    """Gradients that backward passes of others made or added to, and how their losses were scaled."""

    def check(self, own: Scaling) -> bool:
        """Say whether gradients of others' losses are here.

        Raises:
            EngineError: such a loss was scaled otherwise than this engine's own.
        """
        here = {id(grad) for grad in self.local.present_gradients()}
        found = {scaling for scaling, ref in self._got if id(ref()) in here}
        for each in found - {own}:
            raise EngineError(
                "some of this engine's gradients come from backward() of another engine, whose loss "
                f"was divided by {each.accumulation} accumulation steps and scaled by "
                f"{each.loss_scale:g}; here it is {own.accumulation} and {own.loss_scale:g}: give "
                "engines that share a loss the same gradient_accumulation_steps and precision, or "
                "drop those gradients by zero_grad() of this engine"
            )
        return bool(found)

    def forget(self) -> None:
        """Begin anew, after a step or when gradients are dropped."""
        self._got.clear()

    def note(self, scaling: Scaling, grads: list[Tensor]) -> None:
        """Remember gradients that another engine's loss has changed."""
        self._got += [(scaling, weakref.ref(each)) for each in grads]


class SharedLoss:
    """Knows all engines of this process."""

    def __init__(self) -> None:
        self.is_running = False
        """Whether a backward pass of an engine runs; checkpoints run others inside of it."""
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()

    def join(self, local: OwnedParams) -> Share:
        """Return what a new engine keeps, as long as it lives."""
        share = Share(local)
        self._shares.add(share)
        return share

    @contextmanager
    def backward(self, own: Share, scaling: Scaling) -> Iterator[None]:
        """Let the other engines know whether the backward pass inside has given them gradients."""
        others = [(each, each.local.versions()) for each in self._shares if each is not own]
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
        for each, before in others:
            each.note(scaling, each.local.changed_gradients(before))
