"""Let one rank step each parameter that its optimizer must see whole.

    before optimizer.step()   each gradient and weight travels from the ranks' shards to the rank that owns it
    optimizer.step()          sees whole parameters, of their own shapes: those that this rank owns
    after it                  the new weights travel back into the shards

Groups that are elementwise (`loop.elementwise`) step shards as ever, in the same call. States live on owners alone. A step
costs (g + 2 w) P / N bytes a rank, with g and w bytes of an element of gradient and weight, P elements that are owned and
N ranks; gathering every gradient everywhere would cost g P and N times the work. A communication is one packed
all-to-all of at most `_BUCKET_BYTES`, or of one parameter.

Stage 1 does the same to the slices of its whole weights. With several copies of the weights (hybrid sharding) the ranks
of each copy own and step alike.
"""

from __future__ import annotations

import json
import math
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.untraced import leave_alone
from torchloom.checkpoints.values import Value, decode, dtype_of, value_of
from torchloom.config import Config
from torchloom.errors import ConfigError, EngineError
from torchloom.log import get_logger
from torchloom.loop.elementwise import check_may_divide, is_elementwise
from torchloom.runtime import Communicator, lookup
from torchloom.shard import Layout, ParamSpec, divided_by_id, living_layouts, local_shard
from torchloom.shard.optimizer_states import find_owners_by
from torchloom.shard.shards import valid_numel

logger = get_logger(__name__)

_BUCKET_BYTES = 32 << 20
"""Of the parameters in one exchange: what each rank holds twice while it is under way is 1/N of gradients and weights."""


class Unit(NamedTuple):
    """A parameter that one rank steps."""

    param: nn.Parameter
    spec: ParamSpec
    layout: Layout
    owner: int
    """Its rank among those that share one copy of the weights."""

    @property
    def is_mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.layout.rank

    def numel_of(self, rank: int) -> int:
        """Return how many elements a rank's shard holds, without padding."""
        return valid_numel(self.spec.numel, rank, self.spec.shard_numel)

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return what of a flat whole tensor is in a rank's shard."""
        start = rank * self.spec.shard_numel
        return flat[start : start + self.numel_of(rank)]


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
            state = _from_owner(unit, mine)
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
        for bucket in _buckets(present):
            wholes = _to_owners(bucket)
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
        for bucket in _buckets(units):
            _from_owners(bucket, stepped)

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


class Load(NamedTuple):
    """What a rank has to do for its parameters: compared by cost, then by memory."""

    cost: float
    numel: float

    @staticmethod
    def of(shape: Sequence[int]) -> Load:
        """Return the load of a parameter: the products of a step of Newton-Schulz, as good a guess for other optimizers.

        With s the smaller and l the larger side it is 4 s^2 l + 2 s^3 (Jordan et al., "Muon", 2024); of what is no matrix,
        its elements.
        """
        numel = math.prod(shape)
        if len(shape) < 2 or not numel:
            return Load(numel, numel)
        small, large = sorted((shape[0], numel // shape[0]))
        return Load(4 * small**2 * large + 2 * small**3, numel)


def add_to_least(loads: list[Load], load: Load) -> int:
    """Add a load to that of the rank with the least, and return this rank.

    Loads that come in descending order end up within a third of the best division, and closer where they are many:
    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    owner = loads.index(min(loads))
    loads[owner] = Load(loads[owner].cost + load.cost, loads[owner].numel + load.numel)
    return owner


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


def _buckets(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Group parameters of one model and dtype up to `_BUCKET_BYTES`; each bucket is ordered by owner."""
    open_: dict[tuple[str, torch.dtype], list[Unit]] = {}
    for unit in units:
        key = unit.layout.handle, unit.spec.dtype
        bucket = open_.setdefault(key, [])
        bucket.append(unit)
        if sum(each.spec.numel for each in bucket) * unit.spec.dtype.itemsize >= _BUCKET_BYTES:
            yield sorted(open_.pop(key), key=lambda each: each.owner)
    for bucket in open_.values():
        yield sorted(bucket, key=lambda each: each.owner)


def _to_owners(bucket: Sequence[Unit]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the whole weights and gradients, flat, that this rank owns, by the id of the parameter."""
    comm, rank, size = _comm_of(bucket)
    mine = [unit for unit in bucket if unit.is_mine]
    sent = [
        local_shard(part).view(-1)[: unit.numel_of(rank)]
        for unit in bucket
        for part in (unit.param, _gradient(unit))
    ]
    numels = [
        [2 * sum(unit.numel_of(i) for unit in bucket if unit.owner == j) for j in range(size)]
        for i in range(size)
    ]
    names = [unit.spec.name for unit in bucket]
    received = comm.exchange(torch.cat(sent), numels, "gradients to owners", names)
    parts = received.split([unit.numel_of(i) for i in range(size) for unit in mine for _ in "wg"])
    rows = [parts[i * 2 * len(mine) : (i + 1) * 2 * len(mine)] for i in range(size)]
    columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    return {
        id(unit.param): (columns[2 * place], columns[2 * place + 1])
        for place, unit in enumerate(mine)
    }


def _from_owners(bucket: Sequence[Unit], stepped: dict[int, Tensor]) -> None:
    """Write what owners have stepped into the shards of all ranks."""
    comm, rank, size = _comm_of(bucket)
    mine = [unit for unit in bucket if unit.is_mine]
    flats = {id(unit.param): _checked(unit, stepped[id(unit.param)]) for unit in mine}
    sent = [unit.part_of(flats[id(unit.param)], j) for j in range(size) for unit in mine]
    numels = [
        [sum(unit.numel_of(j) for unit in bucket if unit.owner == i) for j in range(size)]
        for i in range(size)
    ]
    names = [unit.spec.name for unit in bucket]
    empty = local_shard(bucket[0].param).new_empty(0)
    received = comm.exchange(torch.cat([empty, *sent]), numels, "weights from owners", names)
    parts = received.split([unit.numel_of(rank) for unit in bucket])
    for unit, part in zip(bucket, parts, strict=True):
        local_shard(unit.param).view(-1)[: part.numel()].copy_(part)


def _from_owner(unit: Unit, state: Any) -> dict[str, Any] | None:
    """Return the states of one parameter, which its owner has: first what they are, then each tensor."""
    comm, device = lookup(unit.layout.handle), unit.param.device
    told = Value(None) if state is None else value_of(unit.spec.name, dict(state))
    facts = [(key, str(each.dtype)[6:], list(each.shape)) for key, each in told.tensors.items()]
    text = json.dumps([told.tree, facts]).encode()
    length = torch.tensor([len(text)], device=device)
    comm.broadcast([length], unit.owner)
    content = torch.zeros(int(length), dtype=torch.uint8)
    if unit.is_mine:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = content.to(device)
    comm.broadcast([content], unit.owner)
    tree, facts = json.loads(bytes(content.tolist()))
    tensors: dict[str, Tensor] = {}
    for key, dtype, shape in facts:
        own = told.tensors[key].to(device).contiguous() if unit.is_mine else None
        tensors[key] = (
            own if own is not None else torch.empty(shape, dtype=dtype_of(dtype), device=device)
        )
        comm.broadcast([tensors[key]], unit.owner)
    return decode(tree, tensors.__getitem__)


def _comm_of(bucket: Sequence[Unit]) -> tuple[Communicator, int, int]:
    layout = bucket[0].layout
    return lookup(layout.handle), layout.rank, layout.world_size


def _gradient(unit: Unit) -> Tensor:
    grad = unit.param.grad
    assert grad is not None, unit.spec.name
    return grad


def _checked(unit: Unit, stepped: Tensor) -> Tensor:
    if stepped.numel() != unit.spec.numel or stepped.dtype != unit.spec.dtype:
        raise EngineError(
            f"the optimizer gave {unit.spec.name!r} a tensor of shape {tuple(stepped.shape)} and {stepped.dtype}, and it "
            f"has {unit.spec.shape} and {unit.spec.dtype}: an optimizer may change values alone"
        )
    return stepped.reshape(-1)
