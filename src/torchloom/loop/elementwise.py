"""Find out whether an optimizer may step shards: it may if it steps each element independently.

A shard is flat, and the other shards are on other ranks. An optimizer whose result for an element
depends on the shape of its parameter or on other elements (LAMB, Adafactor, Muon, Shampoo, a norm
over all parameters) would step shards without an error, but to wrong weights. Optimizers whose source was
read are known, and a user may declare others (`optimizer.elementwise = True`). Any other runs a trial:

    whole     a twin of the optimizer steps small parameters of the model's shapes
    shards    two more twins step the two halves of the same, with the same gradients
    verdict   refused if an element or a number that the optimizer keeps ends up different, or a state is not
              one value for each element

A trial refutes and proves nothing, so what passes it is named in a warning.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import EngineError
from torchloom.log import get_logger
from torchloom.shard import ParamSpec, divided_by_id
from torchloom.shard.shards import cut, join, shard_numel_of

logger = get_logger(__name__)

ELEMENTWISE = (
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""torch's optimizers that step each element on its own, with all arguments. Subclasses may do anything."""
_ELEMENTWISE_OF_OTHERS = {
    "lion_pytorch.lion_pytorch.Lion",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "schedulefree.sgd_schedulefree.SGDScheduleFree",
}
"""The same of other packages. timm's have an argument `caution`, which divides by a mean over elements."""

_NUM_SHARDS = 2
_GRADIENT_SCALES = (1.0, 30.0, 0.03, 1.0, 1.0, 300.0, 1.0, 0.1)
"""One trial step each: enough for a lookahead of five, and for limits on a gradient's norm."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Share of the largest change of a weight; rounding is 1e-10 and 1e-5 of it, what else was tried
(LAMB, Adafactor, Muon, clipping inside the optimizer) is 1e-2 and more."""
_FEW, _MANY = 60, 16384
"""Elements of a stand-in. The largest parameter of each number of dims has many: some optimizers factor or quantize
only where dims are at least 128, or elements 4096 and a multiple of 256."""


@dataclass(frozen=True)
class ElementwiseTrial:
    """A parameter of an optimizer that a small one replaces in the trial."""

    leaf: nn.Parameter
    """What the optimizer holds: a shard or a whole parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    is_divided: bool
    num_elements: int
    """Of the small one, about."""


def needs_closure(optimizer: Any) -> bool:
    """Say whether `step` cannot be called without a function that evaluates the loss anew."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return False  # not one of torch's: a stand-in that sets `step` on the object
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in kinds for each in parameters)


def check_elementwise(optimizer: Any, specs: dict[int, ParamSpec], stage: int) -> None:
    """Raise if this optimizer is found not to step each element on its own while it holds shards.

    Rank 0 warns, once for each class, if it is neither known to nor declared to.

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
    if not divided or _is_known(optimizer):
        return
    shapes = [specs[id(e)].shape if id(e) in specs else tuple(e.shape) for e in leaves]
    by_size = sorted(range(len(leaves)), key=lambda index: math.prod(shapes[index]))
    large = {len(shapes[index]): index for index in by_size}.values()
    trials = [
        ElementwiseTrial(leaf, shape, id(leaf) in specs, _MANY if index in large else _FEW)
        for index, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True))
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
    if type(optimizer) not in _WARNED and dist.get_rank() == 0:
        _WARNED.add(type(optimizer))
        logger.warning(
            "%s steps shards of parameters at ZeRO stage %d, and is not known to step each element on its own: a trial "
            "found no difference to whole parameters, which proves nothing; set `optimizer.elementwise = True` if you "
            "know that it does, or use stage 0",
            type(optimizer).__name__,
            stage,
        )


_WARNED: set[type] = set()
"""Classes of optimizers that the log has named."""


def _is_known(optimizer: Any) -> bool:
    kind = type(optimizer)
    return (
        kind in ELEMENTWISE
        or f"{kind.__module__}.{kind.__qualname__}" in _ELEMENTWISE_OF_OTHERS
        or getattr(optimizer, "elementwise", False) is True
    )


_CHECKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers that may step what they hold: how many parameters that was."""


def check_once(optimizer: optim.Optimizer) -> None:
    """Check an optimizer that is about to step shards in a loop of the user's own: `shard_model` sees none.

    Raises:
        EngineError: as `check_elementwise`.
    """
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    if _is_known(optimizer) or _CHECKED.get(optimizer) == num_params:
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
        # As under a norm, whose rows some optimizers recognise by this alone (AdamP, SGDP).
        gradients[0] = [_across_rows(*pair) for pair in zip(gradients[0], starts, strict=True)]
        try:
            whole, *shards = (
                _stepped(optimizer, trials, starts, gradients, rank)
                for rank in (None, *range(_NUM_SHARDS))
            )
        except Exception as error:  # noqa: BLE001  code of others, tried on purpose
            first_line = str(error).strip().partition("\n")[0]
            return f"{_FAILED} ({type(error).__name__}: {first_line})"
    odd_state = next((each.odd_state for each in (whole, *shards) if each.odd_state), None)
    if odd_state is not None:
        return f"it keeps {odd_state}, which is not one value for each element"
    for each in shards:
        if not _are_equal(whole.numbers, each.numbers, _TOLERANCE[dtype]):
            return (
                "it keeps a number that it computes over many elements, as Prodigy's step size is"
            )
    weights = [each.weights for each in shards]
    return _compare(trials, starts, whole.weights, weights, _TOLERANCE[dtype])


def _are_equal(numbers: list[float], others: list[float], tolerance: float) -> bool:
    pair = torch.tensor(numbers, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)
    same_length = len(numbers) == len(others)
    return same_length and torch.allclose(*pair, rtol=tolerance, atol=0, equal_nan=True)


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


@dataclass(frozen=True)
class _Stepped:
    """A twin after its trial steps."""

    weights: list[Tensor]
    numbers: list[float]
    """All that it keeps, in groups, in states and elsewhere."""
    odd_state: str | None


def _stepped(
    optimizer: Any,
    trials: Sequence[ElementwiseTrial],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    rank: int | None,
) -> _Stepped:
    """Step a twin over whole values or one rank's shards."""

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
    numbers = [
        float(found)
        for found in _found_in(vars(twin), set(map(id, stand_ins)))
        if not isinstance(found, Tensor) or found.numel() == 1
    ]
    return _Stepped([each.detach() for each in stand_ins], numbers, _odd_state(twin, stand_ins))


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


def _odd_state(twin: Any, stand_ins: Sequence[nn.Parameter]) -> str | None:
    """Describe a state that is neither one number nor one value for each element, such as a quantized one."""
    for stand_in in stand_ins:
        for value in _found_in(twin.state.get(stand_in, {}), set()):
            if not isinstance(value, Tensor):
                continue
            if type(value) not in (Tensor, nn.Parameter):
                return f"a state of class {type(value).__name__}"
            if value.numel() not in (1, stand_in.numel()):
                return f"a state of shape {tuple(value.shape)}"
    return None


def _found_in(value: Any, seen: set[int]) -> Iterator[Tensor | float]:
    """Yield the numbers and tensors in nested containers and objects, except those in `seen`."""
    if isinstance(value, (int, float)):
        yield value
        return
    if id(value) in seen or callable(value) or isinstance(value, types.ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _found_in(each, seen)
    else:
        yield from _found_in(getattr(value, "__dict__", ()), seen)


def _across_rows(gradient: Tensor, weight: Tensor) -> Tensor:
    """Make each row of a matrix's gradient orthogonal to the row of the weight."""
    if gradient.dim() < 2 or not gradient.numel():
        return gradient
    rows, along = gradient.flatten(1), weight.flatten(1)
    share = (rows * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True)
    return (rows - share * along).view_as(gradient)


def _values(trial: ElementwiseTrial, dtype: torch.dtype) -> Tensor:
    """Make values of a small shape like the parameter's, with rows of different sizes."""
    limit = max(2, round(trial.num_elements ** (1 / max(1, len(trial.shape)))))
    grain = 16 if limit >= 16 else 1
    sizes = (limit // grain * grain + grain * place for place in range(len(trial.shape)))
    shape = [min(pair) for pair in zip(trial.shape, sizes, strict=True)]
    shape = [
        3 if size == 2 else size for size in shape
    ]  # a shard of one element looks like a number
    values = torch.randn(shape, dtype=dtype)
    if values.dim():
        rows = torch.randn([shape[0], *[1] * (len(shape) - 1)], dtype=dtype)
        values = values * rows.exp()
    return values.to(trial.leaf.device)
