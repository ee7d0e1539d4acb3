"""Let one rank step each parameter that its optimizer must see whole.

    before optimizer.step()   each gradient and weight travels from the ranks' shards to the rank that owns it
    optimizer.step()          sees whole parameters, of their own shapes: those that this rank owns
    after it                  the new weights travel back into the shards

Groups that are elementwise (`loop.elementwise`) step shards as ever, in the same call. States live on owners alone. A step
costs (g + 2 w) P / N bytes a rank, with g and w bytes of an element of gradient and weight, P elements that are owned and
N ranks; gathering every gradient everywhere would cost g P and N times the work. A communication is one packed
all-to-all of at most `BUCKET_BYTES`, or of one parameter.

Stage 1 does the same to the slices of its whole weights. With several copies of the weights (hybrid sharding) the ranks
of each copy own and step alike.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.untraced import leave_alone
from torchloom.config import Config
from torchloom.errors import ConfigError, EngineError
from torchloom.log import get_logger
from torchloom.loop.elementwise import check_may_divide, is_elementwise
from torchloom.loop.owner_exchanges import buckets, from_owners, state_from_owner, to_owners
from torchloom.loop.owners import Load, Unit, add_to_least
from torchloom.runtime import lookup
from torchloom.shard import Layout, ParamSpec, divided_by_id, living_layouts
from torchloom.shard.optimizer_states import find_owners_by

logger = get_logger(__name__)


class Ownership:
    """The parameters of one optimizer that owners step, and a step of them.

    Args:
        optimizer: over parameters of sharded models; it is not held.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.units: dict[int, Unit] = {}
        """By the id of the parameter."""
        self._loads: dict[str, list[Load]] = {}
        """By the handle of a communicator, of each of its ranks."""
        self._shards: list[tuple[Unit, Tensor, Tensor | None]] = []
        """Data and gradient of what is whole now."""
        self._groups: list[list[nn.Parameter]] = []
        """Parameters of each group while a step sees this rank's alone."""
        self.num_seen = -1
        """Parameters in the optimizer's groups when owners were chosen."""

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
        divided = False
        fresh: list[tuple[nn.Parameter, Layout, ParamSpec]] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                found = known.get(id(param))
                divided |= found is not None
                if found and id(param) not in self.units and not is_elementwise(optimizer, group):
                    fresh.append((param, *found))
        if divided:
            check_may_divide(optimizer)
        fresh.sort(
            key=lambda each: Load.of(each[2].shape), reverse=True
        )  # stable: equal on all ranks
        for param, layout, spec in fresh:
            loads = self._loads.setdefault(layout.handle, [Load(0.0, 0.0)] * layout.world_size)
            self.units[id(param)] = Unit(
                param, spec, layout, add_to_least(loads, Load.of(spec.shape))
            )
        self.num_seen = _num_params(optimizer)
        if fresh and fresh[0][1].rank == 0:
            sent = sum(3 * spec.numel * spec.dtype.itemsize for _, _, spec in fresh)
            logger.info(
                "%s steps %d parameters whole, each on one of %d ranks, as it is not known to be elementwise: a step sends "
                "about %.1f MB from each rank (gradients and weights to owners, weights back)",
                type(optimizer).__name__,
                len(fresh),
                fresh[0][1].world_size,
                sent / fresh[0][1].world_size / 1e6,
            )

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
        for unit in self.units.values():
            mine = optimizer.state.get(unit.param) if unit.is_mine else None
            state = state_from_owner(unit, mine)
            if state is not None:
                found[id(unit.param)] = {key: keep(value) for key, value in state.items()}
        return found

    def begin(self) -> None:
        """Make parameters and gradients whole on their owners, and show the optimizer these alone. All ranks must call."""
        self.restore()
        optimizer = self._known_optimizer()
        present = [
            unit
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None and (unit := self.units.get(id(param))) is not None
        ]
        for bucket in buckets(present):
            wholes = to_owners(bucket)
            for unit in bucket:
                self._shards.append((unit, unit.param.data, unit.param.grad))
                whole = wholes.get(id(unit.param))
                unit.param.grad = None
                if whole is not None:
                    weight, grad = (each.view(unit.spec.shape) for each in whole)
                    unit.param.data = weight
                    unit.param.grad = grad
        mine = {id(unit.param) for unit in present if unit.is_mine}
        for group in optimizer.param_groups:
            self._groups.append(group["params"])
            group["params"] = [
                param
                for param in group["params"]
                if id(param) not in self.units or id(param) in mine
            ]

    def end(self) -> None:
        """Bring the stepped weights back into the shards. All ranks must call.

        Raises:
            EngineError: numbers that the optimizer keeps differ between ranks, so it computes them of all parameters; no
                weight that is owned has changed.
        """
        differ = self._numbers_differ()
        stepped = {id(unit.param): unit.param.data for unit, *_ in self._shards if unit.is_mine}
        units = [unit for unit, *_ in self._shards]
        self.restore()
        if differ:
            raise EngineError(
                f"{type(self._known_optimizer()).__name__} keeps numbers that differ between ranks after a step, as it computes "
                "them of several parameters, of which each rank steps some: use stage 0, where each rank steps all of them"
            )
        for bucket in buckets(units):
            from_owners(bucket, stepped)

    def _numbers_differ(self) -> bool:
        """Say whether ranks of the shard group see other numbers in the optimizer and its groups."""
        optimizer = self._known_optimizer()
        found = [value for group in optimizer.param_groups for value in group.values()]
        key = zlib.crc32(array("d", _numbers([*found, *vars(optimizer).values()])))
        for handle, device in {
            unit.layout.handle: unit.param.device for unit, *_ in self._shards
        }.items():
            own = torch.tensor([key], device=device)
            rows = lookup(handle).gather_small(own, "numbers of the optimizer")
            if bool((rows != key).any()):
                return True
        return False

    def restore(self) -> None:
        """Let parameters be shards again, as they were before the step; also after a step that raised."""
        if not self._groups and not self._shards:
            return
        for unit, data, grad in self._shards:
            unit.param.grad = None
            unit.param.data = data
            unit.param.grad = grad
        for group, params in zip(self._known_optimizer().param_groups, self._groups, strict=False):
            group["params"] = params
        self._shards, self._groups = [], []

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
    if known.is_stepping:
        return known
    if known.units and not known.layouts <= set(map(id, living_layouts())):
        if optimizer.state:
            raise EngineError(
                f"the model was unsharded after {type(optimizer).__name__} had stepped it, and the states of a parameter are on "
                "the rank that owned it: keep optimizer.state_dict() before, and load it into a new optimizer"
            )
        known = _KNOWN[optimizer] = Ownership(optimizer)
    if known.num_seen != _num_params(optimizer):
        known.choose(optimizer)
    return known


def refuse_budget(config: Config, optimizer: Any) -> None:
    """Refuse a memory budget where owners step parameters: a plan counts states of shards.

    Raises:
        ConfigError: there is one.
    """
    options = config.compile
    asked = options.memory_budget is not None or options.plan is not None
    stepped = getattr(optimizer, "optimizer", optimizer)  # of a framework's wrapper
    if asked and stepped is not None and ownership_of(stepped).units:
        raise ConfigError(
            f"compile.memory_budget and compile.plan do not count the states that {type(stepped).__name__} keeps of whole "
            "parameters on the ranks that own them: drop the key, or use an optimizer that is elementwise, such as AdamW"
        )


def begin_whole_step(optimizer: Optimizer) -> None:
    """Make whole what an optimizer is about to step as an owner."""
    for other in list(_KNOWN.values()):
        other.restore()  # its step raised
    ownership_of(optimizer).begin()


def end_whole_step(optimizer: Optimizer) -> None:
    """Bring weights back into shards after a step."""
    ownership = _KNOWN.get(optimizer)
    if ownership is not None and ownership.is_stepping:
        ownership.end()


find_owners_by(ownership_of)
for _function in (ownership_of, begin_whole_step, end_whole_step):
    leave_alone(_function, "it communicates")


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, (int, float)):
            yield float(value)
        elif isinstance(value, Tensor):
            if value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
                yield float(value)
        elif type(value) in (list, tuple):
            yield from _numbers(value)  # type: ignore[arg-type]


def _num_params(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
