"""Follow the steps of optimizers over torchloom's parameters by torch's public hooks.

A rank that skips a step communicates like the others but trains to other weights; one whose schedule reads a value of
its own (ReduceLROnPlateau on its own loss) steps its shards at another rate. So steps are counted, and the numbers
that they were taken with are noted, for ranks to compare. In loops without an engine the count is also the number of
the run's step, and a step makes slices of parameters, moves the schedule of passes, and shares buffers.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.subclasses import is_inside_step
from torchloom.checkpoints.engine_values import buffers_of
from torchloom.errors import EngineError
from torchloom.loop.coupling import joins_parameters, witnesses_of
from torchloom.loop.owned_params import check_steps_alone, has_engine
from torchloom.loop.ownership import (
    begin_whole_step,
    end_whole_step,
    ownership_of,
    restore_after_raised,
)
from torchloom.loop.rounding import check_carried, count_step, is_rounded
from torchloom.loop.slices import begin_step, call_closure_first, end_step, settle_slices
from torchloom.position import POSITION, Rates
from torchloom.runtime import Communicator, lookup, tell_step
from torchloom.shard import is_sharded, keep_hook, layout_of, share_buffers, whole_states
from torchloom.shard.leaf_modules import used_params
from torchloom.shard.parameter import be_plain_in_steps

_STEPPED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that optimizers step: those of models that `shard_model` sharded, and of engines. Each leads to a set of its model:
the ids of what optimizers have stepped first since the number of the loop's step changed, as several make one step."""


def count_steps_of(params: Iterable[nn.Parameter]) -> None:
    """Let steps of optimizers over these parameters count as steps of this process."""
    _hook_all_optimizers()
    of_model: set[int] = set()
    _STEPPED.update((param, of_model) for param in params)


@functools.cache
def _hook_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    be_plain_in_steps()


_Listener = tuple[frozenset[int], Callable[[], None]]
"""Parameters by id, of which each counts; and what is called after a step over any of them."""
_LISTENERS: weakref.WeakKeyDictionary[nn.Module, dict[str, _Listener]] = weakref.WeakKeyDictionary()


def after_steps_of(
    model: nn.Module, optimizer: Optimizer | None, tell: Callable[[], None], what: str
) -> None:
    """Call `tell` after each optimizer step over a model's parameters, as long as the model lives.

    Args:
        model: sharded; `tell` must not hold it, or it would never be freed.
        optimizer: the loop's. A step counts when it steps this one's first parameter, whoever takes it: the
            optimizer may be a wrapper, or be made anew. None: steps over any parameter of the model count.
        tell: replaces that of an earlier call.
        what: names the kind of call; one of each is made.
    """
    counted = model.parameters() if optimizer is None else _stepped_by(optimizer)[:1]
    _LISTENERS.setdefault(model, {})[what] = (frozenset(map(id, counted)), tell)


def settle_before_use(model: nn.Module) -> None:
    """Call `settle` before the eager model of a loop is used or saved; the steps of a compiled one call it themselves."""
    keep_hook(model, model.register_forward_pre_hook(settle), is_for_eager=True)
    keep_hook(model, model.register_state_dict_pre_hook(settle))


def settle(model: nn.Module, *_: Any) -> None:
    """Undo a step that raised on all ranks, such as one that was interrupted."""
    if not torch.compiler.is_compiling():
        restore_after_raised()
        settle_slices(model)


def share_buffers_after_steps(model: nn.Module, comm: Communicator) -> None:
    """Give all ranks the persistent buffers of rank 0 after each optimizer step over a model's parameters.

    DistributedDataParallel does it before the next forward, which graphs would have to hold. Training that does not
    read them before its next step sees no difference. Buffers that are not persistent are caches, whose shapes may
    differ between ranks.

    Args:
        model: sharded.
        comm: of its ranks.
    """
    known = weakref.ref(model)

    def share() -> None:
        found = known()
        if found is not None and is_sharded(found):
            share_buffers(list(buffers_of(found).values()), comm.broadcast)

    after_steps_of(model, None, share, "buffers")


_ACCUMULATING: list[nn.Module] = []
"""Models inside of whose `no_sync` the process is."""


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients in a loop written for DistributedDataParallel, with the same results.

    It saves no communication: each backward reduces its gradients, inside of the block as well, since ranks keep
    shards of them at stages 2 and 3. After the last backward, outside, gradients are what they would be with DDP.

    Args:
        model: sharded.

    Raises:
        ShardError: the model is not sharded.
        EngineError: an optimizer steps the model's parameters inside of the block.

    Example:
        >>> with torchloom.no_sync(model):  # doctest: +SKIP
        ...     model(first).backward()
        >>> model(last).backward()  # doctest: +SKIP
    """
    layout_of(model)
    _ACCUMULATING.append(model)
    try:
        yield
    finally:
        _ACCUMULATING.remove(model)


def _check_synchronised(optimizer: Optimizer) -> None:
    held = {id(param) for model in _ACCUMULATING for param in model.parameters()}
    if held and not held.isdisjoint(map(id, _stepped_by(optimizer))):
        raise EngineError(
            f"{type(optimizer).__name__}.step was called inside of torchloom.no_sync(model), where gradients accumulate: "
            "step after the block, behind a backward pass outside of it"
        )


def _stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _first_counted(optimizer: Optimizer) -> nn.Parameter | None:
    """Return the first of its parameters whose steps count, None if none is of ours."""
    return next((p for p in _stepped_by(optimizer) if p in _STEPPED), None)


def _tell_listeners(optimizer: Optimizer) -> None:
    stepped = set(map(id, _stepped_by(optimizer)))
    for params, tell in [each for found in list(_LISTENERS.values()) for each in found.values()]:
        if not params.isdisjoint(stepped):
            tell()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_inside_step():  # of an optimizer that wraps this one
        return None
    check_steps_alone(_stepped_by(optimizer))
    _check_synchronised(optimizer)
    first = _first_counted(optimizer)
    if first is None:
        return None
    restore_after_raised()
    ownership = ownership_of(optimizer)
    is_begun = bool(ownership.units) or is_rounded(optimizer)
    if not has_engine(first):
        whole_states(optimizer)
        if is_rounded(optimizer):
            ownership.step = count_step(optimizer)
    with_loss = call_closure_first(optimizer, args, kwargs, is_always=is_begun)
    _drop_unused(_stepped_by(optimizer))
    begin_step(optimizer)
    if is_begun:
        begin_whole_step(optimizer)
    _WITNESSES[optimizer] = witnesses_of(optimizer)
    return with_loss


def _drop_unused(params: list[nn.Parameter]) -> None:
    """Take the gradient from parameters of leaf modules that no rank has used: a step would still decay them."""
    for handle, used in used_params(params).items():
        found = lookup(handle).any_of(
            list(used.values()), params[0].device, "which weights of leaf modules were used"
        )
        for param, is_used in zip(used, found, strict=True):
            if not is_used:
                param.grad = None


_WITNESSES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What is known, before a step, of what it should make of some parameters."""


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_inside_step():
        return
    is_divisible = all(each.agrees for each in _WITNESSES.pop(optimizer, ()))
    end_whole_step(optimizer, is_divisible)
    end_step(optimizer)
    if not is_divisible:
        raise joins_parameters(optimizer)
    first = _first_counted(optimizer)
    if first is None:
        return
    POSITION.updates += 1
    if not has_engine(first):
        check_carried(optimizer)
        stepped = _STEPPED[first]
        if not stepped or id(first) in stepped:
            stepped.clear()
            POSITION.step += 1
        stepped.add(id(first))
        note_rates(optimizer)
        tell_step(POSITION.step)
    _tell_listeners(optimizer)


_SHOWN = 3


def note_rates(optimizer: Optimizer) -> None:
    """Add the optimizer's rates and other numbers to the position that ranks compare.

    Numbers are compared in single precision: a schedule that ranks on different hosts compute with
    different libraries may differ in the last bit.
    """
    known = getattr(optimizer, "defaults", {})  # not every one is of torch's class
    groups = [
        {
            key: list(_numbers(value))
            for key, value in group.items()
            if key != "params" and (key in known or not known)  # others a program keeps for itself
        }
        for group in optimizer.param_groups
    ]
    key = zlib.crc32(array("f", (n for group in groups for each in group.values() for n in each)))
    if key != POSITION.rates.key:
        POSITION.rates = Rates(key, functools.partial(_words, type(optimizer).__name__, groups))


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (bool, int, float)):
        yield float(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield float(value.detach())


def _words(kind: str, groups: Sequence[dict[str, list[float]]]) -> str:
    """Return the numbers of each group."""
    texts = (
        ", ".join(f"{key}={_short(numbers)}" for key, numbers in group.items() if numbers)
        for group in groups
    )
    told = list(dict.fromkeys(texts))
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return f"{kind}: {'; '.join(told[:_SHOWN])}{more}"


def _short(numbers: list[float]) -> str:
    told = [f"{number:.7g}" for number in numbers]
    return told[0] if len(told) == 1 else f"({', '.join(told)})"
