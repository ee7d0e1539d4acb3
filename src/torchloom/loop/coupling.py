"""Find optimizers that compute numbers of several parameters: kept ones by a checksum, others by a parameter stepped alone.

Ranks that divide parameters among them see some each, so a norm over all gradients inside of a step would be another one on
each rank. In the first steps of an optimizer that nobody has read, a copy of it steps a copy of this rank's smallest
parameter by itself. What it makes of that must be what the optimizer makes of it among the others.
"""

from __future__ import annotations

import copy
import types
import zlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.untraced import leave_alone
from torchloom.errors import EngineError
from torchloom.loop.elementwise import is_known
from torchloom.loop.optimizer_list import OptimizerList
from torchloom.shard import divided_by_id

_STEPS = 3
"""That are compared: some optimizers do other things in their first one."""
_TOLERANCE = 1e-3
"""Of the largest change of an element; a step's own rounding is far below, a norm over all gradients far above."""
_COMPARED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The number of steps that were compared, by optimizer."""


class Witness(NamedTuple):
    """A parameter before a step, and after a step that saw it alone."""

    param: Tensor
    before: Tensor
    alone: Tensor

    @property
    def agrees(self) -> bool:
        """Whether the step among other parameters has made the same of it."""
        change = (self.alone - self.before).abs().max()
        differs = (self.param.detach().view_as(self.alone) - self.alone).abs().max()
        return not bool(differs > _TOLERANCE * change + 1e-6 * self.before.abs().max())


def witnesses_of(optimizer: Optimizer) -> list[Witness]:
    """Step a parameter alone, before the optimizer steps all; none where nothing is to be found out.

    Args:
        optimizer: about to step; neither it nor its parameters change.
    """
    members = optimizer.linked() if isinstance(optimizer, OptimizerList) else [optimizer]
    return [found for each in members for found in _witness(each)]


def held_beside(optimizer: Optimizer) -> list[Tensor]:
    """Return tensors such as those that witnesses hold while an optimizer steps, for a trial of its memory."""
    members = optimizer.linked() if isinstance(optimizer, OptimizerList) else [optimizer]
    held = []
    for each in members:
        params = [param for group in each.param_groups for param in group["params"]]
        if not is_known(each) and len(params) > 1:
            least = min(params, key=lambda param: param.numel()).detach()
            held += [least.clone(), least.clone()]
    return held


def joins_parameters(optimizer: Any) -> EngineError:
    """Return the error for an optimizer whose step of a parameter depends on others."""
    return EngineError(
        f"{type(optimizer).__name__} makes something else of a parameter when it sees no others, so it computes numbers of "
        "several parameters, of which each rank steps some: use stage 0, where each rank steps all of them"
    )


def counts_parts(optimizer: Any) -> EngineError:
    """Return the error for an optimizer that counts in a step, and was declared to step some parameters and then others."""
    return EngineError(
        f"{type(optimizer).__name__} was declared to step by parts (by_parts = True), but a step of some parameters changes a "
        "number that it keeps for all of them: do not declare it so"
    )


def _witness(optimizer: Optimizer) -> Iterator[Witness]:
    done = _COMPARED.get(optimizer, 0)
    if done >= _STEPS or is_known(optimizer):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    params = [param for param in params if param.grad is not None and param.numel()]
    divided = divided_by_id()
    if len(params) < 2 or not any(id(param) in divided for param in params):
        return
    _COMPARED[optimizer] = done + 1
    param = min(params, key=lambda each: each.numel())
    with torch.random.fork_rng([param.device] if param.is_cuda else []):
        try:
            first, second = _stepped(optimizer, param), _stepped(optimizer, param)
        except Exception:  # noqa: BLE001  of an optimizer that cannot be copied, or steps no parameter alone
            return
    is_sure = torch.equal(first, second)  # chance decides otherwise
    del second
    if is_sure:
        yield Witness(param, param.detach().clone(), first)


def _stepped(optimizer: Optimizer, param: Tensor) -> Tensor:
    """Return what a copy of an optimizer makes of a copy of one of its parameters."""
    made = nn.Parameter(param.detach().clone())
    made.grad = None if param.grad is None else param.grad.clone()
    vars(made).update(vars(param))
    twin = object.__new__(type(optimizer))
    left_out = ("param_groups", "state", "step")  # schedules put their own `step` on the object
    for name, value in vars(optimizer).items():
        if name not in left_out:
            vars(twin)[name] = OrderedDict() if name.endswith("_hooks") else _copied(value)
    twin.param_groups = []
    for group in optimizer.param_groups:
        if any(each is param for each in group["params"]):
            rest = {name: value for name, value in group.items() if name != "params"}
            twin.param_groups.append({**copy.deepcopy(rest), "params": [made]})
    twin.state = defaultdict(dict)
    for key, state in optimizer.state.items():
        if not isinstance(key, Tensor):
            twin.state[key] = copy.deepcopy(state)
    if param in optimizer.state:
        twin.state[made] = copy.deepcopy(optimizer.state[param])
    twin.step()
    made.grad = None  # a parameter that is part of a cycle lives on for a while
    return made.detach()


def _copied(value: Any) -> Any:
    """Copy an attribute that is plain.

    Raises:
        TypeError: it may lead to the optimizer itself, another one, or parameters.
    """
    if isinstance(value, dict):
        return {_copied(key): _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_copied(each) for each in value)
    if value is None or isinstance(
        value, (bool, int, float, complex, str, type, torch.dtype, torch.device, types.FunctionType)
    ):
        return value
    raise TypeError(type(value).__name__)


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, (int, float)):
            yield float(value)
        elif isinstance(value, Tensor):
            if value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
                yield float(value)
        elif type(value) in (list, tuple):
            if not any(isinstance(each, nn.Parameter) for each in value):  # type: ignore[attr-defined]
                yield from _numbers(value)  # type: ignore[arg-type]
        elif type(value) is dict:
            yield from _numbers(value.values())  # type: ignore[attr-defined]


def numbers_key(optimizer: Optimizer) -> int:
    """Return a checksum of the numbers in an optimizer and its groups, but those that are kept beside a parameter."""
    groups = optimizer.param_groups
    found = [value for group in groups for name, value in group.items() if name != "params"]
    found += [value for key, value in optimizer.state.items() if not isinstance(key, Tensor)]
    return zlib.crc32(array("d", _numbers([*found, *vars(optimizer).values()])))


leave_alone(witnesses_of, "it steps a copy")
