"""Find out whether an optimizer may step shards: it may if it steps each element independently.

A shard is flat, and the other shards are on other ranks. An optimizer whose result for an element
depends on the shape of its parameter or on other elements (LAMB, Adafactor, Muon, Shampoo, a norm
over all parameters) would step shards without an error, but to wrong weights. Optimizers whose source was
read are known, and a user may declare others (`optimizer.elementwise = True`). Any other runs a trial:

    whole     a twin of the optimizer steps small parameters of the model's shapes
    half      another twin steps the first half of each, as a rank of two would, with the same gradients
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.weak import WeakIdKeyDictionary

from torchloom.errors import EngineError
from torchloom.log import get_logger
from torchloom.shard import Layout, ParamSpec, divided_by_id
from torchloom.shard.shards import cut, shard_numel_of

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

_GRADIENT_SCALES = (1.0, 30.0, 0.03, 1.0, 1.0, 300.0, 1.0, 0.1)
"""One trial step each: enough for a lookahead of five, and for limits on a gradient's norm."""
_TOLERANCE = 1e-3
"""Share of the largest change of a weight; rounding is 1e-5 of it, what else was tried
(LAMB, Adafactor, Muon, clipping inside the optimizer) is 1e-2 and more."""
_FEW, _MANY = 60, 16384
"""Elements of a stand-in. The largest parameter of each number of dims has many: some optimizers factor or quantize
only where dims are at least 128, or elements 4096 and a multiple of 256."""


class _StandIn(NamedTuple):
    """A small parameter that takes the place of one of the optimizer's in the trial."""

    leaf: nn.Parameter
    """What the optimizer holds: a shard or a whole parameter."""
    shape: list[int]
    """Of the small one, whole."""
    is_divided: bool

    def values(self) -> Tensor:
        """Make values with rows of different sizes."""
        values = torch.randn(self.shape)
        if self.shape:
            values = values * torch.randn([self.shape[0], *[1] * (len(self.shape) - 1)]).exp()
        return values.to(self.leaf.device)

    def half(self, value: Tensor) -> Tensor:
        """Return a copy of what the first of two ranks holds."""
        return cut(value, 0, shard_numel_of(value.numel(), 2)) if self.is_divided else value.clone()


def needs_closure(optimizer: Any) -> bool:
    """Say whether `step` cannot be called without a function that evaluates the loss anew."""
    step = getattr(type(optimizer), "step", None)
    if step is None:
        return False  # not one of torch's: a stand-in that sets `step` on the object
    parameters = list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is each.empty and each.kind in kinds for each in parameters)


def check_elementwise(optimizer: Any) -> None:
    """Raise if this optimizer is found not to step each element on its own while it holds shards.

    Rank 0 warns, once for each class, if it is neither known to nor declared to.

    Args:
        optimizer: any of torch's protocol; neither it nor its parameters change.

    Raises:
        EngineError: its result for an element depends on more than this element.

    Example:
        >>> check_elementwise(torch.optim.LBFGS([torch.zeros(2)]))  # all whole
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    if _is_known(optimizer) or _CHECKED.get(optimizer) == len(leaves):
        return
    known = divided_by_id()
    divided = [known[id(leaf)] for leaf in leaves if id(leaf) in known]
    if divided:
        layout, spec = divided[0]
        closure = "its step needs a closure, whose loss differs between ranks"
        reason = (
            closure if needs_closure(optimizer) else _why_not(optimizer, _stand_ins(leaves, known))
        )
        if reason is not None:
            raise EngineError(
                f"{type(optimizer).__name__} cannot step shards of parameters (the first is "
                f"{spec.name!r}, at ZeRO stage {layout.stage}): {reason}, so that sharded training would not reach the "
                "weights of one process; use stage 0, where parameters stay whole, or an optimizer that steps each "
                "element on its own, such as AdamW, Adam or SGD"
            )
        _warn_once(type(optimizer), layout.stage)
    _CHECKED[optimizer] = len(leaves)


_CHECKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers that may step what they hold: how many parameters that was."""


_WARNED: set[type] = set()
"""Classes of optimizers that the log has named."""


def _warn_once(kind: type, stage: int) -> None:
    if kind not in _WARNED and dist.get_rank() == 0:
        _WARNED.add(kind)
        logger.warning(
            "%s steps shards of parameters at ZeRO stage %d, and is not known to step each element on its own: a trial "
            "found no difference to whole parameters, which proves nothing; set `optimizer.elementwise = True` if you "
            "know that it does, or use stage 0",
            kind.__name__,
            stage,
        )


def _stand_ins(
    leaves: Sequence[nn.Parameter], divided: Mapping[int, tuple[Layout, ParamSpec]]
) -> list[_StandIn]:
    shapes = [divided[id(e)][1].shape if id(e) in divided else tuple(e.shape) for e in leaves]
    by_size = sorted(range(len(leaves)), key=lambda index: math.prod(shapes[index]))
    large = {len(shapes[index]): index for index in by_size}.values()
    return [
        _StandIn(leaf, _small(shape, _MANY if index in large else _FEW), id(leaf) in divided)
        for index, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True))
    ]


def _is_known(optimizer: Any) -> bool:
    kind = type(optimizer)
    return (
        kind in ELEMENTWISE
        or f"{kind.__module__}.{kind.__qualname__}" in _ELEMENTWISE_OF_OTHERS
        or getattr(optimizer, "elementwise", False) is True
    )


def _why_not(optimizer: Any, stand_ins: Sequence[_StandIn]) -> str | None:
    """Return why the optimizer may not step shards; None if it may."""

    def halves(values: Sequence[Tensor]) -> list[Tensor]:
        return [each.half(value) for each, value in zip(stand_ins, values, strict=True)]

    device = stand_ins[0].leaf.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        starts = [each.values() for each in stand_ins]
        gradients = [
            [each.values() * scale * torch.randn(()).exp() for each in stand_ins]
            for scale in _GRADIENT_SCALES
        ]
        # As under a norm, whose rows some optimizers recognise by this alone (AdamP, SGDP).
        gradients[0] = [_across_rows(*pair) for pair in zip(gradients[0], starts, strict=True)]
        try:
            whole = _stepped(optimizer, stand_ins, starts, gradients)
            half = _stepped(
                optimizer, stand_ins, halves(starts), [halves(step) for step in gradients]
            )
        except Exception as error:  # noqa: BLE001  code of others, tried on purpose
            first_line = str(error).strip().partition("\n")[0]
            return f"a trial step of it failed ({type(error).__name__}: {first_line})"
    odd_state = whole.odd_state or half.odd_state
    if odd_state is not None:
        return f"it keeps {odd_state}, which is not one value for each element"
    if whole.numbers.shape != half.numbers.shape or not torch.allclose(
        whole.numbers, half.numbers, rtol=_TOLERANCE, atol=0, equal_nan=True
    ):
        return "it keeps a number that it computes over many elements, as Prodigy's step size is"
    results = zip(starts, whole.weights, halves(whole.weights), half.weights, strict=True)
    moved = [
        ((after - before).abs().max(), (part - other).abs().max())
        for before, after, part, other in results
        if after.numel()
    ]
    if not all(bool(far <= _TOLERANCE * change) for change, far in moved):
        return "what it does to an element depends on the parameter's shape or other elements"
    if not any(bool(change > 0) for change, _ in moved):
        return "a trial step of it changed nothing, so that it cannot be judged"
    return None


class _Stepped(NamedTuple):
    """A twin after its trial steps."""

    weights: list[Tensor]
    numbers: Tensor
    """All that it keeps, in groups, in states and elsewhere."""
    odd_state: str | None


def _stepped(
    optimizer: Any,
    stand_ins: Sequence[_StandIn],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> _Stepped:
    """Step a twin over some values."""
    params = [nn.Parameter(value.clone()) for value in starts]
    torch.manual_seed(1)
    twin = _twin(optimizer, dict(zip((id(each.leaf) for each in stand_ins), params, strict=True)))
    for step in gradients:
        for param, value in zip(params, step, strict=True):
            param.grad = value.clone()
        type(optimizer).step(twin)
    numbers = [
        float(found)
        for found in _found_in(vars(twin), set(map(id, params)))
        if not isinstance(found, Tensor) or found.numel() == 1
    ]
    return _Stepped(
        [param.detach() for param in params],
        torch.tensor(numbers, dtype=torch.float64),
        _odd_state(twin, params),
    )


def _twin(optimizer: Any, memo: dict[int, Any]) -> Any:
    """Copy an optimizer with all that it refers to and without states; `memo` holds other parameters."""
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


def _odd_state(twin: Any, params: Sequence[nn.Parameter]) -> str | None:
    """Describe a state that is neither one number nor one value for each element, such as a quantized one."""
    for param in params:
        for value in _found_in(twin.state.get(param, {}), set()):
            if not isinstance(value, Tensor):
                continue
            if type(value) not in (Tensor, nn.Parameter):
                return f"a state of class {type(value).__name__}"
            if value.numel() not in (1, param.numel()):
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


def _small(shape: tuple[int, ...], num_elements: int) -> list[int]:
    """Return a shape like the parameter's of about so many elements."""
    limit = max(2, round(num_elements ** (1 / max(1, len(shape)))))
    grain = 16 if limit >= 16 else 1
    sizes = (limit // grain * grain + grain * place for place in range(len(shape)))
    small = [min(pair) for pair in zip(shape, sizes, strict=True)]
    return [
        3 if size == 2 else size for size in small
    ]  # a shard of one element looks like a number
