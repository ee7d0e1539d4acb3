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
_BY_PARTS = (optim.Adafactor, optim.Muon)
"""Optimizers that see parameters whole and keep nothing but states of each (torch 2.11-2.15): stepped some by some, they do as
at once."""
_BY_PARTS_OF_OTHERS = {"transformers.optimization.Adafactor"}  # 5.23.0
_JOINS_PARAMETERS = ("Prodigy", "DAdapt")
"""How names of optimizers begin that compute one step size of all parameters, in whatever package (prodigyopt,
dadaptation, pytorch_optimizer)."""
_SUMS = {"prodigyopt.prodigy.Prodigy"}
"""Those that sum over all ranks with `fsdp_in_use=True` (1.1.2). dadaptation's leave a rank out whose gradients are all zero."""
_COMMUNICATES = ("muon.Muon", "muon.MuonWithAuxAdam")
"""Optimizers that divide parameters among ranks themselves (KellerJordan/Muon), by collectives that have no names."""
_COUNTS = {"heavyball": "param_count"}
"""Packages whose optimizers count, in their first step, the elements of the parameters that a group has then (3.2.1)."""
_NORMS_OVER_ALL = ("max_grad_norm", "global_grad_max_norm")
"""Arguments by which optimizers (LAMB of timm, apex, pytorch_optimizer) clip by a norm over all their parameters."""


def is_elementwise(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Say whether an optimizer steps each element of a group on its own, as far as is known."""
    return (
        type(optimizer) in ELEMENTWISE
        or _name_of(optimizer) in _ELEMENTWISE_OF_OTHERS
        or sums_over_ranks(optimizer)
        or getattr(optimizer, "elementwise", False) is True
        or group.get("elementwise") is True
    )


def may_step_by_parts(optimizer: Any) -> bool:
    """Say whether stepping some parameters, and then others, is known to be the same as stepping all of them at once.

    Each parameter's update then depends on this parameter alone, and no count or number is kept for several: so it is with
    the classes of two lists, and where a user declares `optimizer.by_parts = True`. Hooks would run once for each part.
    """
    if has_step_hooks(optimizer):
        return False
    together = getattr(optimizer, "optimizers", None)
    if together is not None:
        return all(map(may_step_by_parts, together))
    return (
        type(optimizer) in (*ELEMENTWISE, *_BY_PARTS)
        or _name_of(optimizer) in _BY_PARTS_OF_OTHERS
        or getattr(optimizer, "by_parts", False) is True
    )


def has_step_hooks(optimizer: Any) -> bool:
    """Say whether a user has registered hooks on the steps of this optimizer."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def step_without_hooks(optimizer: Any) -> None:
    """Step an optimizer by the code of its class, without what torch, schedules and users hung on `step`."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def is_known(optimizer: Any) -> bool:
    """Say whether the source of an optimizer was read: what it makes of a parameter depends on this parameter alone."""
    return (
        type(optimizer) in (*ELEMENTWISE, *_BY_PARTS)
        or _name_of(optimizer) in _ELEMENTWISE_OF_OTHERS | _BY_PARTS_OF_OTHERS
        or sums_over_ranks(optimizer)
    )


def sums_over_ranks(optimizer: Any) -> bool:
    """Say whether an optimizer joins numbers of all parameters, and is told to sum them over ranks that step shards."""
    return _name_of(optimizer) in _SUMS and all(
        group.get("fsdp_in_use") and group.get("slice_p", 1) == 1
        for group in optimizer.param_groups
    )


def counts_elements(optimizer: Any) -> str | None:
    """Return the name under which an optimizer keeps in each group how many elements its parameters have, if it does."""
    return _COUNTS.get(type(optimizer).__module__.partition(".")[0])


def needs_closure(optimizer: Any) -> bool:
    """Say whether `step` cannot be called without a function that evaluates the loss anew."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return False  # not one of torch's: a stand-in that sets `step` on the object
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in kinds for each in parameters)


def check_may_divide(optimizer: Any, *, some_whole: bool) -> None:
    """Raise if an optimizer cannot step its parameters on several ranks, each rank some of them.

    Args:
        optimizer: any of torch's protocol, over parameters that are divided among ranks.
        some_whole: whether each rank steps others as wholes.

    Raises:
        EngineError: it evaluates the loss itself, or is known to join numbers of all parameters.
    """
    for each in getattr(optimizer, "optimizers", [optimizer]):
        reason = _why_not(each, some_whole)
        if reason is None:
            continue
        raise EngineError(
            f"{type(each).__name__} cannot step parameters that ranks divide among them: {reason}; use stage 0, where "
            "each rank steps all of them"
        )


def _why_not(optimizer: Any, some_whole: bool) -> str | None:
    if needs_closure(optimizer):
        return "its step needs a closure, whose loss differs between ranks"
    if sums_over_ranks(optimizer):
        if some_whole:
            return (
                "it sums over ranks, where parameters that each rank keeps whole would count once for each (shard them all: "
                "persistence_threshold=0)"
            )
    elif any(kind.__name__.startswith(_JOINS_PARAMETERS) for kind in type(optimizer).__mro__):
        hint = " (pass fsdp_in_use=True, slice_p=1)" if _name_of(optimizer) in _SUMS else ""
        return (
            f"it computes one step size of all parameters, of which each rank would know some{hint}"
        )
    if _name_of(optimizer) in _COMMUNICATES:
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


def _name_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
