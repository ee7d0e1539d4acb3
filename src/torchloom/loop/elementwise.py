"""Which groups of an optimizer may step shards: those whose optimizer steps each element independently.

A shard is flat, and the other shards are on other ranks. An optimizer whose result for an element depends on the shape
of its parameter or on other elements (Muon, SOAP, Shampoo, Adafactor, LAMB) has to see the parameter whole: one rank
owns it and steps it (`loop.ownership`). Elementwise are the classes of a list, whose source was read, and what a user
declares: `optimizer.elementwise = True`, or `{"params": ..., "elementwise": True}` for a group.

An optimizer that joins numbers of several parameters, as Prodigy does for its step size, is right in neither way: its
parameters are on several ranks. Those that are known are refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import optim

from torchloom.errors import EngineError

ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""torch's optimizers that step each element on its own, with all arguments (2.11-2.15). Subclasses may do anything."""
_ELEMENTWISE_OF_OTHERS = {
    "lion_pytorch.lion_pytorch.Lion",  # 0.2.3
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",  # 1.4.1
    "schedulefree.sgd_schedulefree.SGDScheduleFree",  # 1.4.1
}
"""The same of other packages. timm's have an argument `caution`, which divides by a mean over elements."""
_JOINS_PARAMETERS = ("Prodigy", "DAdapt")
"""How names of optimizers begin that compute one step size of all parameters, in whatever package (prodigyopt,
dadaptation, pytorch_optimizer). prodigyopt can sum over ranks, but would count parameters that ranks keep whole once each."""
_COMMUNICATES = ("muon.Muon", "muon.MuonWithAuxAdam")
"""Optimizers that divide parameters among ranks themselves (KellerJordan/Muon), by collectives that have no names."""
_NORMS_OVER_ALL = ("max_grad_norm", "global_grad_max_norm")
"""Arguments by which optimizers (LAMB of timm, apex, pytorch_optimizer) clip by a norm over all their parameters."""


def is_elementwise(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Say whether an optimizer steps each element of a group on its own, as far as is known."""
    kind = type(optimizer)
    return (
        kind in ELEMENTWISE
        or f"{kind.__module__}.{kind.__qualname__}" in _ELEMENTWISE_OF_OTHERS
        or getattr(optimizer, "elementwise", False) is True
        or group.get("elementwise") is True
    )


def needs_closure(optimizer: Any) -> bool:
    """Say whether `step` cannot be called without a function that evaluates the loss anew."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return False  # not one of torch's: a stand-in that sets `step` on the object
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in kinds for each in parameters)


def check_may_divide(optimizer: Any) -> None:
    """Raise if an optimizer cannot step its parameters on several ranks, each rank some of them.

    Args:
        optimizer: any of torch's protocol, over parameters that are divided among ranks.

    Raises:
        EngineError: it evaluates the loss itself, or is known to join numbers of all parameters.
    """
    for each in getattr(optimizer, "optimizers", [optimizer]):
        reason = _why_not(each)
        if reason is None:
            continue
        raise EngineError(
            f"{type(each).__name__} cannot step parameters that ranks divide among them: {reason}; use stage 0, where "
            "each rank steps all of them"
        )


def _why_not(optimizer: Any) -> str | None:
    if needs_closure(optimizer):
        return "its step needs a closure, whose loss differs between ranks"
    if any(kind.__name__.startswith(_JOINS_PARAMETERS) for kind in type(optimizer).__mro__):
        return "it computes one step size of all parameters, of which each rank would know some"
    if f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _COMMUNICATES:
        return (
            "it communicates by itself (use its variant for one device, such as SingleDeviceMuon)"
        )
    for name in _NORMS_OVER_ALL:
        if any(group.get(name) for group in optimizer.param_groups):
            return (
                f"its {name} clips by a norm over all parameters, of which each rank would know some "
                f"(pass {name}=None, and clip by gradient_clipping or torchloom.clip_grad_norm_)"
            )
    return None
