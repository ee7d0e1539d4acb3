"""Find out whether an optimizer may step shards: it may if it steps each element independently.

A shard is flat, and the other shards are on other ranks. An optimizer whose result for an element
depends on the shape of its parameter or on other elements (LAMB, Adafactor, Muon, Shampoo, a norm
over all parameters) would step shards without an error, but to wrong weights. torch's own optimizers are
known; any other runs a trial:

    whole     a twin of the optimizer steps small parameters of the model's shapes
    shards    two more twins step the two halves of the same, with the same gradients
    verdict   elementwise if all elements end up equal but for rounding
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import EngineError
from torchloom.shard import ParamSpec, divided_by_id
from torchloom.shard.shards import cut, join, shard_numel_of

ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""torch's optimizers that step each element on its own, by their definition."""

_NUM_SHARDS = 2
_GRADIENT_SCALES = (1.0, 30.0, 0.03, 1.0, 1.0, 300.0, 1.0, 0.1)
"""One trial step each: enough for a lookahead of five, and for limits on a gradient's norm."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Share of the largest change of a weight; rounding is 1e-10 and 1e-5 of it, what else was tried
(LAMB, Adafactor, Muon, clipping inside the optimizer) is 1e-2 and more."""
_MOST_ELEMENTS = 60


@dataclass(frozen=True)
class ElementwiseTrial:
    """A parameter of an optimizer that a small one replaces in the trial."""

    leaf: nn.Parameter
    """What the optimizer holds: a shard or a whole parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    is_divided: bool


def needs_closure(optimizer: Any) -> bool:
    """Say whether `step` cannot be called without a function that evaluates the loss anew."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return False  # not one of torch's: a stand-in that sets `step` on the object
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in kinds for each in parameters)


def check_elementwise(optimizer: Any, specs: dict[int, ParamSpec], stage: int) -> None:
    """Raise unless this optimizer may step shards, if it holds any.

    Args:
        optimizer: any of torch's protocol; neither it nor its parameters change.
        specs: facts about the divided leaves that a rank steps, by the leaf's id.
        stage: the ZeRO stage, for the message.

    Raises:
        EngineError: its result for an element depends on more than this element.

    Example:
        >>> check_elementwise(torch.optim.LBFGS([torch.zeros(2)]), {}, stage=0)  # all whole
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    divided = [leaf for leaf in leaves if id(leaf) in specs]
    if not divided or type(optimizer) in ELEMENTWISE:
        return
    trials = [
        ElementwiseTrial(
            leaf,
            specs[id(leaf)].shape if id(leaf) in specs else tuple(leaf.shape),
            id(leaf) in specs,
        )
        for leaf in leaves
    ]
    reason = _why_not(optimizer, trials)
    if reason is not None:
        raise EngineError(
            f"{type(optimizer).__name__} cannot step shards of parameters (the first is "
            f"{specs[id(divided[0])].name!r}, at ZeRO stage {stage}): {reason}, so that sharded "
            "training would not reach the weights of one process; use stage 0, where parameters "
            "stay whole, or an optimizer that steps each element on its own, such as AdamW, Adam "
            "or SGD"
        )


@functools.cache
def watch_steps() -> None:
    """Check every optimizer that steps shards in a loop of the user's own, at its first step.

    `shard_model` sees no optimizer; torch calls the hook at each step of each one.
    """
    register_optimizer_step_pre_hook(_check_once)


_CHECKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers that may step what they hold: how many parameters that was."""


def _check_once(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    if type(optimizer) in ELEMENTWISE or _CHECKED.get(optimizer) == num_params:
        return
    divided = divided_by_id()
    stage = max((layout.stage for layout, _ in divided.values()), default=0)
    check_elementwise(optimizer, {key: spec for key, (_, spec) in divided.items()}, stage)
    _CHECKED[optimizer] = num_params


def _why_not(optimizer: Any, trials: Sequence[ElementwiseTrial]) -> str | None:
    """Return why the optimizer may not step shards; None if it may."""
    if needs_closure(optimizer):
        return "its step needs a closure, whose loss differs between ranks"
    reason = _try(optimizer, trials, torch.float64)
    if reason is not None and reason.startswith(_FAILED):
        reason = _try(optimizer, trials, torch.float32)  # some kernels know no float64
    return reason


_FAILED = "a trial step of it failed"


def _try(optimizer: Any, trials: Sequence[ElementwiseTrial], dtype: torch.dtype) -> str | None:
    devices = [trials[0].leaf.device] if trials[0].leaf.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)
        starts = [_values(trial, dtype) for trial in trials]
        gradients = [
            [_values(trial, dtype) * scale * torch.randn((), dtype=dtype).exp() for trial in trials]
            for scale in _GRADIENT_SCALES
        ]
        try:
            whole, odd_state = _stepped(optimizer, trials, starts, gradients, None)
            shards = [
                _stepped(optimizer, trials, starts, gradients, rank)[0]
                for rank in range(_NUM_SHARDS)
            ]
        except Exception as error:  # noqa: BLE001  code of others, tried on purpose
            first_line = str(error).strip().partition("\n")[0]
            return f"{_FAILED} ({type(error).__name__}: {first_line})"
    if odd_state is not None:
        return f"it keeps a state of shape {odd_state}, which depends on the parameter's shape"
    return _compare(trials, starts, whole, shards, _TOLERANCE[dtype])


def _compare(
    trials: Sequence[ElementwiseTrial],
    starts: Sequence[Tensor],
    whole: Sequence[Tensor],
    shards: Sequence[Sequence[Tensor]],
    tolerance: float,
) -> str | None:
    moved = False
    for index, trial in enumerate(trials):
        if not starts[index].numel():
            continue  # a parameter without elements
        change = (whole[index] - starts[index]).abs().max()
        moved = moved or bool(change > 0)
        parts = [each[index] for each in shards]
        shape = starts[index].shape
        for found in [join(torch.cat(parts), shape)] if trial.is_divided else parts:
            apart = (found - whole[index]).abs().max()
            if not bool(apart <= tolerance * change):
                return (
                    "what it does to an element depends on the parameter's shape or other elements"
                )
    return None if moved else "a trial step of it changed nothing, so that it cannot be judged"


def _stepped(
    optimizer: Any,
    trials: Sequence[ElementwiseTrial],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    rank: int | None,
) -> tuple[list[Tensor], tuple[int, ...] | None]:
    """Step a twin over whole values or one rank's shards; return the result and a state of odd shape."""

    def part(value: Tensor, trial: ElementwiseTrial) -> Tensor:
        if rank is None or not trial.is_divided:
            return value.clone()
        return cut(value, rank, shard_numel_of(value.numel(), _NUM_SHARDS))

    stand_ins = [
        nn.Parameter(part(value, trial)) for value, trial in zip(starts, trials, strict=True)
    ]
    torch.manual_seed(1)
    twin = _twin(optimizer, trials, stand_ins)
    for step in gradients:
        for stand_in, value, trial in zip(stand_ins, step, trials, strict=True):
            stand_in.grad = part(value, trial)
        type(optimizer).step(twin)
    return [each.detach() for each in stand_ins], _odd_state(twin, stand_ins)


def _twin(
    optimizer: Any, trials: Sequence[ElementwiseTrial], stand_ins: Sequence[nn.Parameter]
) -> Any:
    """Copy an optimizer with all that it refers to, over other parameters and without states."""
    memo: dict[int, Any] = {
        id(trial.leaf): stand_in for trial, stand_in in zip(trials, stand_ins, strict=True)
    }
    memo[id(optimizer.state)] = defaultdict(dict)
    kind: Any = type(optimizer)
    twin = kind.__new__(kind)
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a schedule's wrapper, which steps the optimizer itself
        is_hooks = name.startswith("_optimizer_") and isinstance(value, OrderedDict)
        twin.__dict__[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    return twin


def _odd_state(twin: Any, stand_ins: Sequence[nn.Parameter]) -> tuple[int, ...] | None:
    for stand_in in stand_ins:
        for value in twin.state.get(stand_in, {}).values():
            if isinstance(value, Tensor) and value.numel() not in (1, stand_in.numel()):
                return tuple(value.shape)
    return None


def _values(trial: ElementwiseTrial, dtype: torch.dtype) -> Tensor:
    """Make values of a small shape like the parameter's, with rows of different sizes."""
    limit = max(2, round(_MOST_ELEMENTS ** (1 / max(1, len(trial.shape)))))
    shape = [min(size, limit + place) for place, size in enumerate(trial.shape)]
    values = torch.randn(shape, dtype=dtype)
    if values.dim():
        rows = torch.randn([shape[0], *[1] * (len(shape) - 1)], dtype=dtype)
        values = values * rows.exp()
    return values.to(trial.leaf.device)
