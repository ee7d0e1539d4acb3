"""Let one rank step each parameter that its optimizer must see whole.

    before optimizer.step()   each gradient and weight travels from the ranks' shards to the rank that owns it
    optimizer.step()          sees whole parameters, of their own shapes: those that this rank owns
    after it                  the new weights travel back into the shards

Groups that are elementwise (`loop.elementwise`) step shards as ever, in the same call. States live on owners alone. A step
costs (g + 2 w) P / N bytes a rank, with g and w bytes of an element of gradient and weight, P elements that are owned and
N ranks; gathering every gradient everywhere would cost g P and N times the work. A communication is one packed
all-to-all of about `BUCKET_BYTES`, or of one larger parameter, and the next one runs beside what is done to a bucket:

    by parts   go 0 | go 1, step 0, back 0 | go 2, step 1, back 1 | ...    optimizers known, or declared, to be equal by parts
    at once    go 0 | go 1, unpack 0 | ... | step all | back 0 | back 1    others: `step` is called once, with all that is owned

Where bf16 parameters are rounded stochastically (`loop.rounding`), what a step sees is fp32, and rounded before it travels.
Stage 1 does the same to the slices of its whole weights. With several copies of the weights (hybrid sharding) the ranks
of each copy own and step alike.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.subclasses import as_plain_tensors
from torchloom._torch.untraced import leave_alone
from torchloom.checkpoints.values import wrappers_of
from torchloom.errors import EngineError
from torchloom.events import OwnersChosen, emit
from torchloom.log import get_logger
from torchloom.loop.coupling import counts_parts, joins_parameters, numbers_key
from torchloom.loop.elementwise import (
    check_may_divide,
    counts_elements,
    is_elementwise,
    may_step_by_parts,
    step_without_hooks,
)
from torchloom.loop.owner_exchanges import (
    BeginExchange,
    Trip,
    begin_exchange,
    buckets,
    state_from_owner,
)
from torchloom.loop.owners import Load, Unit, add_to_least, owners_chosen
from torchloom.loop.rounding import Wide, in_chunks, is_rounded
from torchloom.loop.slices import written_in_slices
from torchloom.runtime import lookup
from torchloom.shard import Layout, ParamSpec, divided_by_id, living_layouts, local_shard
from torchloom.shard.leaf_modules import HELD
from torchloom.shard.optimizer_states import find_owners_by

logger = get_logger(__name__)


class Ownership:
    """The parameters of one optimizer that owners step, and a step of them.

    Args:
        optimizer: over parameters of sharded models; it is not held.
        begin: begins an all-to-all between ranks.
    """

    def __init__(self, optimizer: Optimizer, begin: BeginExchange = begin_exchange) -> None:
        self._optimizer, self._begin_exchange = weakref.ref(optimizer), begin
        self.units: dict[int, Unit] = {}
        """By the id of the parameter."""
        self._loads: dict[str, list[Load]] = {}
        """By the handle of a communicator, of each of its ranks."""
        self._away: list[Trip] = []
        """Parameters that are on their way to owners, or whole there."""
        self._returning: list[Trip] = []
        """Those whose stepped weights are on their way back."""
        self._handles: dict[str, torch.device] = {}
        """Communicators of the parameters of this step, and where they lie."""
        self._groups: list[list[nn.Parameter]] = []
        """Parameters of each group while a step sees this rank's alone."""
        self.step = 0
        """Number of the step, which chooses the bits of a stochastic rounding."""
        self._wide: Wide | None = None
        """What the step under way sees in fp32."""
        self._counts = False
        """Whether a step of a part changed numbers of the optimizer that are not of this part alone."""
        self.seen = 0
        """Which parameters were in the optimizer's groups when owners were chosen."""

    @property
    def layouts(self) -> set[int]:
        """The ids of the layouts of all models whose parameters are owned."""
        return {id(unit.layout) for unit in self.units.values()}

    @property
    def is_stepping(self) -> bool:
        """Whether parameters are whole on their owners now."""
        return bool(self._groups)

    def choose(self, optimizer: Optimizer) -> None:
        """Choose owners for the parameters that have none; equal on all ranks.

        Raises:
            EngineError: the optimizer is known to be right on no part of the parameters.
        """
        known = divided_by_id()
        divided = whole = False
        fresh: list[tuple[nn.Parameter, Layout, ParamSpec]] = []
        counted = counts_elements(optimizer)
        for group in optimizer.param_groups:
            if counted is not None:  # of whole parameters, and of all: a rank sees some
                specs = (known.get(id(param), (None, param))[1] for param in group["params"])
                group.setdefault(counted, sum(math.prod(each.shape) for each in specs))
            for param in group["params"]:
                found = known.get(id(param))
                divided |= found is not None
                whole |= found is None
                if found and id(param) not in self.units and not is_elementwise(optimizer, group):
                    fresh.append((param, *found))
        if divided:
            check_may_divide(optimizer, some_whole=whole)
        fresh.sort(
            key=lambda each: Load.of(each[2].shape), reverse=True
        )  # stable: equal on all ranks
        for param, layout, spec in fresh:
            loads = self._loads.setdefault(layout.handle, [Load(0.0, 0.0)] * layout.world_size)
            self.units[id(param)] = Unit(
                param, spec, layout, add_to_least(loads, Load.of(spec.shape))
            )
        self.seen = _params_key(optimizer)
        if not fresh:
            return
        for told in self.chosen():
            emit(told)
            if told.parameters and fresh[0][1].rank == 0:
                logger.info(
                    "%s steps %d parameters whole, each on one of %d ranks, as %s: a step sends about %.1f MB from each rank "
                    "(gradients and weights to owners, weights back)",
                    told.optimizer,
                    len(told.parameters),
                    fresh[0][1].world_size,
                    told.reason,
                    told.step_bytes / fresh[0][1].world_size / 1e6,
                )

    def chosen(self) -> tuple[OwnersChosen, ...]:
        """Return what of the optimizer, or of each of several that step together, owners step."""
        return owners_chosen(self._known_optimizer(), self.units)

    def owns(self, param: Tensor) -> bool | None:
        """Say whether this rank is the owner; None of a parameter that each rank steps itself."""
        unit = self.units.get(id(param))
        return None if unit is None else unit.is_mine

    def states(self, keep: Callable[[Any], Any]) -> dict[int, dict[str, Any]]:
        """Return the states of owned parameters on all ranks, by the id of the parameter. All ranks must call.

        Args:
            keep: called with each value before the next one travels; returns what takes its place.
        """
        optimizer, found = self._known_optimizer(), dict[int, dict[str, Any]]()
        wrappers = wrappers_of(optimizer)
        for unit in self.units.values():
            mine = optimizer.state.get(unit.param) if unit.is_mine else None
            state = state_from_owner(unit, mine, wrappers)
            if state is not None:
                found[id(unit.param)] = {key: keep(value) for key, value in state.items()}
        return found

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Show the optimizer the weights that this rank owns inside a `with` block, and give all ranks what was written there."""
        if not self.units or self.is_stepping:
            yield
            return
        without = [unit.param for unit in self.units.values() if unit.param.grad is None]
        for param in without:
            param.grad = torch.zeros_like(local_shard(param))  # a gradient travels with each weight
        try:
            self.begin(steps=False)
            yield
            self.bring_back()
        finally:
            self.restore()
            for param in without:
                param.grad = None

    def begin(self, *, steps: bool = True) -> None:
        """Bring parameters and gradients to their owners, and show the optimizer these alone. All ranks must call.

        The next bucket travels meanwhile. Of an optimizer that may step by parts, all buckets but the last one are stepped here
        and begin to travel back: the others wait for the optimizer's own call. So do all chunks of fp32 copies but the last one.

        Args:
            steps: whether a step follows; False: something else that writes into weights.
        """
        self.restore()
        optimizer = self._known_optimizer()
        present = [
            unit
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and (unit := self.units.get(id(param))) is not None
        ]
        self._groups = [group["params"] for group in optimizer.param_groups]
        # Some optimizers look for their parameters among those of modules: ranks cannot gather, as each asks for others.
        HELD.update((id(unit.param), unit.param) for unit in self.units.values())
        self._handles = {unit.layout.handle: unit.param.device for unit in present}
        split = list(buckets(present))
        by_parts = steps and may_step_by_parts(optimizer)
        for trip in self._arriving(split):
            if by_parts and trip.bucket is not split[-1]:
                self._step_alone(optimizer, [unit.param for unit in trip.mine])
                self._bring_back(trip)
        mine = {id(unit.param) for trip in self._away for unit in trip.mine}
        self._show(optimizer, lambda param: id(param) not in self.units or id(param) in mine)
        if steps and is_rounded(optimizer):
            shown = [param for group in optimizer.param_groups for param in group["params"]]
            *others, last = in_chunks(shown) if by_parts and shown else [shown]
            for some in others:
                self._step_alone(optimizer, some)
            self._show_some(optimizer, last)
            self._wide = Wide(optimizer, last, self.step)

    def _arriving(self, split: Sequence[Sequence[Unit]]) -> Iterator[Trip]:
        """Yield each bucket when it is on its owners, and begin to send the next one before that."""
        for at in range(len(split) + 1):
            if at < len(split):
                self._away.append(Trip(split[at], self._begin_exchange))
            if at:
                trip = next(each for each in self._away if each.bucket is split[at - 1])
                trip.arrive()
                yield trip

    def _show(self, optimizer: Optimizer, is_shown: Callable[[Tensor], bool]) -> None:
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [param for param in params if is_shown(param)]

    def _show_some(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        chosen = set(map(id, params))
        self._show(optimizer, lambda param: id(param) in chosen)

    def _step_alone(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        if not params:
            return
        self._show_some(optimizer, params)
        before = numbers_key(optimizer)
        self._wide = Wide(optimizer, params, self.step)
        step_without_hooks(optimizer)
        self._narrow()
        self._counts |= numbers_key(optimizer) != before

    def _narrow(self) -> None:
        wide, self._wide = self._wide, None
        if wide is not None:
            wide.end()

    def _bring_back(self, trip: Trip) -> None:
        """Begin to send back what was stepped, and take in what was sent before."""
        trip.turn_back()
        self._away.remove(trip)
        before, self._returning = self._returning, [trip]
        for each in before:
            each.end()

    def bring_back(self) -> None:
        """Bring stepped weights back into the shards. All ranks must call."""
        self._narrow()
        for trip in list(self._away):
            self._bring_back(trip)
        self.restore()

    def end(self, is_divisible: bool) -> None:
        """Bring stepped weights back into the shards, after a step of the optimizer. All ranks must call.

        Args:
            is_divisible: whether this rank has seen that parameters do not depend on each other.

        Raises:
            EngineError: parameters depend on each other on some rank, or numbers that the optimizer keeps differ between ranks, so
                it computes them of all parameters, and no weight that it owns has changed; or it was declared to step by
                parts, and keeps numbers for all of them.
        """
        differ, counts, joins = self._compare_numbers(joins=not is_divisible)
        if counts or joins or differ:
            self.restore()
        if counts:
            raise counts_parts(self._known_optimizer())
        if differ:
            raise EngineError(
                f"{type(self._known_optimizer()).__name__} keeps numbers that differ between ranks after a step, as it computes "
                "them of several parameters, of which each rank steps some: use stage 0, where each rank steps all of them"
            )
        if joins:
            raise joins_parameters(self._known_optimizer())
        self.bring_back()

    def _compare_numbers(self, *, joins: bool) -> tuple[bool, bool, bool]:
        """Say whether ranks see other numbers in the optimizer and its groups; whether, on any rank, parts changed any, and
        parameters depend on each other.
        """
        key, counts = numbers_key(self._known_optimizer()), self._counts
        self._counts = differ = False
        for handle, device in self._handles.items():
            own = torch.tensor([key, counts, joins], device=device)
            rows = lookup(handle).gather_small(own, "numbers of the optimizer").tolist()
            differ |= any(other != key for other, *_ in rows)
            counts |= any(other for _, other, _ in rows)
            joins |= any(other for *_, other in rows)
        return differ, counts, joins

    def restore(self) -> None:
        """Let parameters be shards again, as they were before the step; also after a step that raised."""
        wide, self._wide = self._wide, None
        if wide is not None:
            wide.undo()
        groups, self._groups = self._groups, []
        for each in self.units:
            HELD.pop(each, None)
        if groups:
            for group, params in zip(self._known_optimizer().param_groups, groups, strict=False):
                group["params"] = params
        away, self._away, returning, self._returning = self._away, [], self._returning, []
        for trip in away:
            trip.undo()
        for trip in returning:
            trip.end()

    def _known_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it has been freed"
        return optimizer


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Optimizers whose groups were looked at."""


def ownership_of(optimizer: Any) -> Ownership:
    """Return who owns parameters of an optimizer; it has no units where each rank steps all that it has.

    Args:
        optimizer: of torch's class, or a stand-in.

    Raises:
        EngineError: the optimizer is known to be right on no part of the parameters.
    """
    known = _KNOWN.get(optimizer)
    if known is None:
        known = _KNOWN[optimizer] = Ownership(optimizer)
        _switch_as_in_steps(type(optimizer))
    if known.is_stepping:
        return known
    if known.units and not known.layouts <= set(map(id, living_layouts())):
        if optimizer.state:
            raise EngineError(
                f"the model was unsharded after {type(optimizer).__name__} had stepped it, and the states of a parameter are on "
                "the rank that owned it: keep optimizer.state_dict() before, and load it into a new optimizer"
            )
        known = _KNOWN[optimizer] = Ownership(optimizer)
    if known.seen != _params_key(optimizer):
        known.choose(optimizer)
    return known


def _switch_as_in_steps(kind: type) -> None:
    """Let `train()` and `eval()` of a class see what its `step` sees.

    Schedule-free optimizers (Defazio et al., arXiv 2405.15682) write their averages into the weights there, which lie where
    their states do alone during a step.
    """
    for name in ("train", "eval"):
        method = getattr(kind, name, None)
        if callable(method) and not hasattr(method, "sees_shards"):
            setattr(kind, name, _as_in_steps(method))


def _as_in_steps(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def switch(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with written_in_slices(optimizer), ownership_of(optimizer).whole(), as_plain_tensors():
            return method(optimizer, *args, **kwargs)

    vars(switch)["sees_shards"] = True
    return switch


def begin_whole_step(optimizer: Optimizer) -> None:
    """Make whole what an optimizer is about to step as an owner, and fp32 what is rounded afterwards."""
    ownership_of(optimizer).begin()


def restore_after_raised() -> None:
    """Let parameters be shards again where an optimizer's step raised."""
    for each in list(_KNOWN.values()):
        each.restore()


def end_whole_step(optimizer: Optimizer, is_divisible: bool) -> None:
    """Bring weights back into shards after a step; see `Ownership.end`."""
    ownership = _KNOWN.get(optimizer)
    if ownership is not None and ownership.is_stepping:
        ownership.end(is_divisible)


find_owners_by(ownership_of)
for _function in (ownership_of, begin_whole_step, restore_after_raised, end_whole_step):
    leave_alone(_function, "it communicates")


def _params_key(optimizer: Any) -> int:
    return hash(tuple(id(param) for group in optimizer.param_groups for param in group["params"]))
